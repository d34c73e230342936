// CUTLASS's implicit GEMM convolution with 3xTF32 products (OpMultiplyAddFastF32), NHWC, behind a C interface: the rival
// of class `fp32` in the layer suites. `fastconv bench build-cutlass` compiles it against CUTLASS's headers.
#include <cutlass/cutlass.h>

// The device header does not stand by itself: the kernels first.
#include <cutlass/conv/kernel/default_conv2d_dgrad.h>
#include <cutlass/conv/kernel/default_conv2d_fprop.h>
#include <cutlass/conv/kernel/default_conv2d_wgrad.h>

#include <cutlass/conv/device/implicit_gemm_convolution.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/reduction/device/reduce_split_k.h>
#include <cutlass/reduction/thread/reduction_operators.h>

#include <cstddef>
#include <memory>

namespace {

namespace conv = cutlass::conv;
using cutlass::gemm::GemmShape;
using cutlass::layout::TensorNHWC;

constexpr int kElementsPerAccess = 4;  // 16 bytes: C and K have to be multiples of it

using EpilogueOp = cutlass::epilogue::thread::LinearCombination<float, kElementsPerAccess, float, float>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>;
using StridedDgradSwizzle = conv::threadblock::StridedDgradIdentityThreadblockSwizzle<1>;
using Instruction = GemmShape<16, 8, 8>;

// The tiles of CUTLASS's own generator for FP32 on sm80 tensor cores (generator.py, 1688 fast FP32 math).
template <class Block_, class Warp_, int Stages_>
struct Tile {
    using Block = Block_;
    using Warp = Warp_;
    static constexpr int kStages = Stages_;
};
using Tile0 = Tile<GemmShape<128, 128, 16>, GemmShape<32, 64, 16>, 4>;
using Tile1 = Tile<GemmShape<256, 64, 16>, GemmShape<64, 32, 16>, 3>;
using Tile2 = Tile<GemmShape<64, 256, 16>, GemmShape<32, 64, 16>, 3>;
using Tile3 = Tile<GemmShape<128, 64, 16>, GemmShape<64, 32, 16>, 4>;
using Tile4 = Tile<GemmShape<64, 128, 16>, GemmShape<32, 64, 16>, 4>;
using Tile5 = Tile<GemmShape<64, 64, 16>, GemmShape<32, 32, 16>, 3>;
constexpr int kTiles = 6;

#define FASTCONV_KERNEL_ARGUMENTS                                                                                      \
    float, TensorNHWC, float, TensorNHWC, float, TensorNHWC, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80

template <class T>
using Fprop = typename conv::kernel::DefaultConv2dFprop<FASTCONV_KERNEL_ARGUMENTS, typename T::Block, typename T::Warp,
                                                        Instruction, EpilogueOp, Swizzle, T::kStages,
                                                        cutlass::arch::OpMultiplyAddFastF32,
                                                        conv::IteratorAlgorithm::kOptimized>::Kernel;
template <class T>
using Dgrad = typename conv::kernel::DefaultConv2dDgrad<FASTCONV_KERNEL_ARGUMENTS, typename T::Block, typename T::Warp,
                                                        Instruction, EpilogueOp, Swizzle, T::kStages,
                                                        cutlass::arch::OpMultiplyAddFastF32,
                                                        conv::IteratorAlgorithm::kOptimized,
                                                        conv::StrideSupport::kUnity>::Kernel;
template <class T>
using StridedDgrad =
    typename conv::kernel::DefaultConv2dDgrad<FASTCONV_KERNEL_ARGUMENTS, typename T::Block, typename T::Warp,
                                              Instruction, EpilogueOp, StridedDgradSwizzle, T::kStages,
                                              cutlass::arch::OpMultiplyAddFastF32, conv::IteratorAlgorithm::kOptimized,
                                              conv::StrideSupport::kStrided>::Kernel;
template <class T>
using Wgrad = typename conv::kernel::DefaultConv2dWgrad<FASTCONV_KERNEL_ARGUMENTS, typename T::Block, typename T::Warp,
                                                        Instruction, EpilogueOp, Swizzle, T::kStages,
                                                        cutlass::arch::OpMultiplyAddFastF32,
                                                        conv::IteratorAlgorithm::kOptimized>::Kernel;

using Reduction = cutlass::reduction::device::ReduceSplitK<cutlass::reduction::kernel::ReduceSplitK<
    cutlass::MatrixShape<4, 32 * kElementsPerAccess>, EpilogueOp,
    cutlass::reduction::thread::ReduceAdd<float, float, kElementsPerAccess>>>;

struct Convolution {
    virtual ~Convolution() = default;
    virtual cutlass::Status prepare(float* a, float* b, float* d, void* workspace, cudaStream_t stream) = 0;
    virtual cutlass::Status run(cudaStream_t stream) = 0;
    std::size_t workspace_bytes = 0;
};

template <class Kernel>
class Implementation final : public Convolution {
    using Device = conv::device::ImplicitGemmConvolution<Kernel>;
    using Arguments = typename Device::Arguments;

public:
    Implementation(conv::Conv2dProblemSize const& size, bool parallel) : size_(size) {
        mode_ = parallel ? conv::SplitKMode::kParallel : conv::SplitKMode::kSerial;
        workspace_bytes = Device::get_workspace_size(arguments(nullptr, nullptr, nullptr));
    }

    bool fits() const {
        return Device::can_implement(arguments(nullptr, nullptr, nullptr)) == cutlass::Status::kSuccess;
    }

    cutlass::Status prepare(float* a, float* b, float* d, void* workspace, cudaStream_t stream) override {
        bool const parallel = mode_ == conv::SplitKMode::kParallel;
        float* partial = static_cast<float*>(workspace);
        // Serial: zeroes the semaphores, which the last block of each tile sets to zero again.
        cutlass::Status status = device_.initialize(arguments(a, b, parallel ? partial : d), workspace, stream);
        if (status != cutlass::Status::kSuccess || !parallel) return status;
        cutlass::gemm::GemmCoord const gemm = conv::implicit_gemm_problem_size(Device::kConvolutionalOperator, size_);
        int const stride = gemm.n();
        return reduction_.initialize({cutlass::MatrixCoord(gemm.m(), gemm.n()), size_.split_k_slices,
                                      std::size_t(gemm.m()) * gemm.n(), {partial, stride}, {d, stride}, {d, stride}});
    }

    cutlass::Status run(cudaStream_t stream) override {
        cutlass::Status status = device_.run(stream);
        if (status != cutlass::Status::kSuccess || mode_ == conv::SplitKMode::kSerial) return status;
        return reduction_.run(stream);
    }

private:
    Arguments arguments(float* a, float* b, float* d) const {
        auto packed = [](cutlass::Tensor4DCoord const& extent) { return TensorNHWC::packed(extent); };
        auto const& s = size_;
        cutlass::Tensor4DCoord const image(s.N, s.H, s.W, s.C), filter(s.K, s.R, s.S, s.C), output(s.N, s.P, s.Q, s.K);
        constexpr auto kOperator = Device::kConvolutionalOperator;
        bool const fprop = kOperator == conv::Operator::kFprop, dgrad = kOperator == conv::Operator::kDgrad;
        TensorNHWC const layout_a = packed(fprop ? image : output), layout_b = packed(fprop || dgrad ? filter : image);
        TensorNHWC const layout_d = packed(fprop ? output : dgrad ? image : filter);
        return Arguments(size_, {a, layout_a}, {b, layout_b}, {d, layout_d}, {d, layout_d}, {1.0f, 0.0f}, mode_);
    }

    conv::Conv2dProblemSize size_;
    conv::SplitKMode mode_;
    Device device_;
    Reduction reduction_;
};

template <class Kernel>
std::unique_ptr<Convolution> make(conv::Conv2dProblemSize const& size, bool parallel) {
    auto made = std::make_unique<Implementation<Kernel>>(size, parallel);
    return made->fits() ? std::move(made) : nullptr;
}

template <template <class> class Kernel>
std::unique_ptr<Convolution> with_tile(int tile, conv::Conv2dProblemSize const& size, bool parallel) {
    switch (tile) {
        case 0: return make<Kernel<Tile0>>(size, parallel);
        case 1: return make<Kernel<Tile1>>(size, parallel);
        case 2: return make<Kernel<Tile2>>(size, parallel);
        case 3: return make<Kernel<Tile3>>(size, parallel);
        case 4: return make<Kernel<Tile4>>(size, parallel);
        case 5: return make<Kernel<Tile5>>(size, parallel);
        default: return nullptr;
    }
}

}  // namespace

extern "C" {

// Rows x columns x depth of a block's tile; null beyond the last.
char const* conv3xtf32_tile_name(int tile) {
    char const* const names[] = {"128x128x16", "256x64x16", "64x256x16", "128x64x16", "64x128x16", "64x64x16"};
    static_assert(sizeof names / sizeof *names == kTiles);
    return tile < kTiles ? names[tile] : nullptr;
}

// pass: 0 forward (a image, b filter, d output), 1 backward_weight (a output's gradient, b image, d filter's),
// 2 backward_input (a output's gradient, b filter, d image's); all dense NHWC or KRSC float. geometry: N H W C K R S P Q
// padding stride dilation. slices: of the sum; parallel: each into its part of the workspace, added by a second kernel,
// else one after the other. Returns null where CUTLASS does not serve the problem.
void* conv3xtf32_create(int pass, int tile, int slices, int parallel, int const* geometry) {
    int const* g = geometry;
    if (g[3] % kElementsPerAccess || g[4] % kElementsPerAccess) return nullptr;
    conv::Conv2dProblemSize const size(g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[9], g[10], g[10],
                                       g[11], g[11], conv::Mode::kCrossCorrelation, slices);
    bool const unit_stride = g[10] == 1;
    if (pass == 0) return with_tile<Fprop>(tile, size, parallel).release();
    if (pass == 1) return with_tile<Wgrad>(tile, size, parallel).release();
    if (pass == 2 && unit_stride) return with_tile<Dgrad>(tile, size, parallel).release();
    if (pass == 2) return with_tile<StridedDgrad>(tile, size, parallel).release();
    return nullptr;
}

std::size_t conv3xtf32_workspace_bytes(void* convolution) {
    return static_cast<Convolution*>(convolution)->workspace_bytes;
}

// Both return a cutlass::Status, 0 for success. prepare: once, with the pointers of all later runs.
int conv3xtf32_prepare(void* convolution, float* a, float* b, float* d, void* workspace, cudaStream_t stream) {
    return int(static_cast<Convolution*>(convolution)->prepare(a, b, d, workspace, stream));
}

int conv3xtf32_run(void* convolution, cudaStream_t stream) {
    return int(static_cast<Convolution*>(convolution)->run(stream));
}

void conv3xtf32_destroy(void* convolution) { delete static_cast<Convolution*>(convolution); }

}  // extern "C"
