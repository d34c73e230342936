#include "studies/ladder/product.cuh"

namespace fastconv::studies::ladder {

template void run_product<float>(const Sizes&, const Rung&, const float*, const float*, float*, float*, std::size_t,
                                 cudaStream_t);

}  // namespace fastconv::studies::ladder
