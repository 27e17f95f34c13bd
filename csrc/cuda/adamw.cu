// Noise and AdamW or Adam in one pass: torch.optim.AdamW's rule (Loshchilov & Hutter 2019; Kingma & Ba 2015).
#include "step.cuh"

namespace fastdp {
namespace {

template <typename Number>
struct AdamWOptions {
    Amounts<Number> draw;
    Number decay, rest1, beta2, rest2, eps, weight_decay, sign;  // rest: 1 - beta
    int keep_sums;
};

template <typename P, typename S>
struct AdamW {
    using Number = arithmetic<P>;
    using Options = AdamWOptions<Number>;
    struct Element {
        Number sum;
        P param;
        S average, square;
    };
    static constexpr int BLOCKS = sizeof(Number) == 8 ? 1 : 3;

    FASTDP_INLINE AdamW(const Options &options, const Header &header) : o(options) {
        read(header, step_size, root);
    }

    FASTDP_INLINE void point_at(const fastdp_cuda_entry &entry, int64_t first) {
        param = global<P>(entry.param) + first, sum = global<Number>(entry.sum) + first;
        average = global<S>(entry.state1) + first, square = global<S>(entry.state2) + first;
    }

    FASTDP_INLINE Element load(int i) const { return {sum[i], param[i], average[i], square[i]}; }

    FASTDP_INLINE Number sum_of(const Element &e) const { return e.sum; }
    FASTDP_INLINE const Amounts<Number> &amounts() const { return o.draw; }

    FASTDP_INLINE void store(int i, const Element &e, Number n) const {
        if (o.keep_sums) sum[i] = n;
        const Number p = widen(e.param), gradient = fma(o.weight_decay, p, o.sign * n);  // L2, or weight_decay = 0
        const Number m = fma(o.rest1, gradient - widen(e.average), widen(e.average));    // m + (1 - beta1) (g - m)
        const Number v = fma(o.rest2 * gradient, gradient, o.beta2 * widen(e.square));
        narrow(average[i], m), narrow(square[i], v);
        narrow(param[i], fma(-step_size, ratio(m, fma(root_of(v), root, o.eps)), o.decay * p));
    }

  private:
    FASTDP_INLINE static float root_of(float x) { return fast_sqrt(x); }
    FASTDP_INLINE static double root_of(double x) { return sqrt(x); }
    FASTDP_INLINE static float ratio(float x, float y) { return x * fast_reciprocal(y); }
    FASTDP_INLINE static double ratio(double x, double y) { return x / y; }
    FASTDP_INLINE static void read(const Header &header, float &step_size, float &root) {
        step_size = header.step_size_single, root = header.root_single;
    }
    FASTDP_INLINE static void read(const Header &header, double &step_size, double &root) {
        step_size = header.step_size, root = header.root;
    }

    const Options &o;
    Number step_size, root;
    P *param;
    Number *sum;
    S *average, *square;
};

}  // namespace
}  // namespace fastdp

using namespace fastdp;

extern "C" int64_t fastdp_cuda_workspace(int64_t entries, int64_t earlier) {
    return (int64_t)sizeof(Header) + entries * (int64_t)sizeof(fastdp_cuda_entry) + earlier * (int64_t)sizeof(Earlier);
}

extern "C" fastdp_cuda_status fastdp_cuda_noisy_adamw(fastdp_cuda_entry *entries, int64_t count, void *workspace,
                                                      int param_type, int state_type, const fastdp_cuda_draw *draw,
                                                      const fastdp_adam *rule, int device, void *stream) {
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("noisy_adamw", guard.error);
    const Powers powers = {rule->lr, rule->beta1, rule->beta2, rule->t};
    return with_types(param_type, state_type, [&](auto *param, auto *state) {
        using Rule = AdamW<std::remove_pointer_t<decltype(param)>, std::remove_pointer_t<decltype(state)>>;
        typename Rule::Options options;
        options.draw = amounts_of(draw->std, draw->scale, false, typename Rule::Number());
        options.eps = rule->eps, options.sign = rule->maximize ? -1 : 1;
        options.rest1 = 1 - rule->beta1, options.beta2 = rule->beta2, options.rest2 = 1 - rule->beta2;
        options.decay = rule->decoupled ? 1 - rule->lr * rule->weight_decay : 1;
        options.weight_decay = rule->decoupled ? 0 : rule->weight_decay;
        options.keep_sums = draw->keep_sums;
        return step_over<Rule>("noisy_adamw", entries, count, workspace, *draw, powers, options, device,
                               (cudaStream_t)stream);
    });
}
