// Noise and SGD in one pass: torch.optim.SGD's rule (momentum as in Sutskever et al. 2013, with torch's differences).
#include "step.cuh"

namespace fastdp {
namespace {

template <typename Number>
struct SgdOptions {
    Amounts<Number> draw;
    Number lr, momentum, rest, weight_decay, sign;  // rest: 1 - dampening
    int keep_sums, nesterov, has_buffer, reads_buffer;
};

template <typename P, typename S>
struct Sgd {
    using Number = arithmetic<P>;
    using Options = SgdOptions<Number>;
    struct Element {
        Number sum;
        P param;
        S buffer;
    };
    static constexpr int BLOCKS = sizeof(Number) == 8 ? 1 : 3;

    FASTDP_INLINE Sgd(const Options &options, const Header &) : o(options) {}

    FASTDP_INLINE void point_at(const fastdp_cuda_entry &entry, int64_t first) {
        param = global<P>(entry.param) + first, sum = global<Number>(entry.sum) + first;
        buffer = global<S>(entry.state1) + first;
    }

    FASTDP_INLINE Element load(int i) const {
        Element e;
        e.sum = sum[i], e.param = param[i];
        if (o.reads_buffer) e.buffer = buffer[i];
        else narrow(e.buffer, (Number)0);
        return e;
    }

    FASTDP_INLINE Number sum_of(const Element &e) const { return e.sum; }
    FASTDP_INLINE const Amounts<Number> &amounts() const { return o.draw; }

    FASTDP_INLINE void store(int i, const Element &e, Number n) const {
        if (o.keep_sums) sum[i] = n;
        const Number p = widen(e.param);
        Number gradient = fma(o.weight_decay, p, o.sign * n);
        if (o.has_buffer) {
            const Number held = widen(e.buffer);
            const Number moved = o.reads_buffer ? fma(o.momentum, held, o.rest * gradient) : gradient;
            narrow(buffer[i], moved);
            gradient = o.nesterov ? fma(o.momentum, moved, gradient) : moved;
        }
        narrow(param[i], fma(-o.lr, gradient, p));
    }

  private:
    const Options &o;
    P *param;
    Number *sum;
    S *buffer;
};

}  // namespace
}  // namespace fastdp

using namespace fastdp;

extern "C" fastdp_cuda_status fastdp_cuda_noisy_sgd(fastdp_cuda_entry *entries, int64_t count, void *workspace,
                                                    int param_type, int state_type, const fastdp_cuda_draw *draw,
                                                    const fastdp_sgd *rule, int device, void *stream) {
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("noisy_sgd", guard.error);
    const Powers powers = {0, 0, 0, 1};
    for (int64_t i = 0; rule->momentum == 0 && i < count; ++i) entries[i].state1 = entries[i].param;  // not touched
    return with_types(param_type, state_type, [&](auto *param, auto *state) {
        using Rule = Sgd<std::remove_pointer_t<decltype(param)>, std::remove_pointer_t<decltype(state)>>;
        typename Rule::Options options;
        options.draw = amounts_of(draw->std, draw->scale, false, typename Rule::Number());
        options.lr = rule->lr, options.momentum = rule->momentum;
        options.rest = 1 - rule->dampening, options.weight_decay = rule->weight_decay;
        options.sign = rule->maximize ? -1 : 1;
        options.keep_sums = draw->keep_sums, options.nesterov = rule->nesterov;
        options.has_buffer = rule->momentum != 0, options.reads_buffer = rule->momentum != 0 && !rule->first;
        return step_over<Rule>("noisy_sgd", entries, count, workspace, *draw, powers, options, device,
                               (cudaStream_t)stream);
    });
}
