"""What every suite needs: our side of a layer, clocks, workers, result files."""
