"""Very many launches: the same bits every time, no hang."""
