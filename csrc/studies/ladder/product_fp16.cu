#include "studies/ladder/product.cuh"

namespace fastconv::studies::ladder {

template void run_product<half_t>(const Sizes&, const Rung&, const half_t*, const half_t*, half_t*, half_t*,
                                  std::size_t, cudaStream_t);

}  // namespace fastconv::studies::ladder
