// Noise and the optimizer's update in one pass over the parameters: SGD and Adam(W) as torch.optim defines them.
//
// Arithmetic in float32, in double where the parameter is (or std or scale is far from 1, see fits_float in noise.h);
// each number is rounded to its tensor's type once.
#include "noise.h"

namespace {

using fastdp::Tile;

template <class T, bool MOMENTUM>
struct Sgd {
    static constexpr int ARRAYS = MOMENTUM ? 2 : 1;
    T lr, momentum, undamped, weight_decay, sign;
    bool nesterov, first;

    template <int W>
    INLINE void apply(const Tile<T> &tile, int at) const {
        const T *grad = tile.grad + at;
        T *param = tile.param + at;
        if (!MOMENTUM) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                param[l] = std::fma(-lr, std::fma(weight_decay, param[l], sign * grad[l]), param[l]);
            }
            return;
        }
        T *buffer = tile.first + at;
#pragma omp simd
        for (int l = 0; l < W; ++l) {
            const T d = std::fma(weight_decay, param[l], sign * grad[l]);
            const T b = first ? d : std::fma(momentum, buffer[l], undamped * d);
            buffer[l] = b;
            param[l] = std::fma(-lr, nesterov ? std::fma(momentum, b, d) : b, param[l]);
        }
    }
};

template <class T, bool PLAIN>
struct Adam {
    static constexpr int ARRAYS = 3;
    T step_size, new_share, new_square_share, root_scale, eps, decay, l2, sign;

    template <int W>
    INLINE void apply(const Tile<T> &tile, int at) const {
        const T *grad = tile.grad + at;
        T *param = tile.param + at, *first = tile.first + at, *second = tile.second + at;
#pragma omp simd
        for (int l = 0; l < W; ++l) {
            const T g = PLAIN ? grad[l] : std::fma(l2, param[l], sign * grad[l]);
            const T p = std::fma(-decay, param[l], param[l]);
            const T m = std::fma(new_share, g - first[l], first[l]);
            const T v = std::fma(new_square_share, std::fma(g, g, -second[l]), second[l]);
            first[l] = m, second[l] = v;
            param[l] = std::fma(-step_size, m / std::fma(std::sqrt(v), root_scale, eps), p);
        }
    }
};

template <class T, bool MOMENTUM>
void sgd(const fastdp::Work &work, const fastdp_sgd *o, int threads) {
    Sgd<T, MOMENTUM> update;
    update.lr = (T)o->lr, update.momentum = (T)o->momentum, update.undamped = (T)(1 - o->dampening);
    update.weight_decay = (T)o->weight_decay, update.sign = o->maximize ? (T)-1 : (T)1;
    update.nesterov = o->nesterov != 0, update.first = o->first != 0;
    fastdp::draw<T>(work, update, threads);
}

template <class T, bool PLAIN>
void adam(const fastdp::Work &work, const fastdp_adam *o, int threads) {
    Adam<T, PLAIN> update;
    update.step_size = (T)(o->lr / (1 - std::pow(o->beta1, (double)o->t)));
    update.root_scale = (T)(1 / std::sqrt(1 - std::pow(o->beta2, (double)o->t)));
    update.new_share = (T)(1 - o->beta1), update.new_square_share = (T)(1 - o->beta2), update.eps = (T)o->eps;
    update.decay = o->decoupled ? (T)(o->lr * o->weight_decay) : (T)0;
    update.l2 = o->decoupled ? (T)0 : (T)o->weight_decay, update.sign = o->maximize ? (T)-1 : (T)1;
    fastdp::draw<T>(work, update, threads);
}

}  // namespace

extern "C" {

void fastdp_sgd_step(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise,
                     const fastdp_sgd *options) {
    const fastdp::Work work = fastdp::work_of(tensors, count, tiles, noise);
    const bool wide = (count > 0 && tensors[0].sum_type == FASTDP_FLOAT64) || !fastdp::fits_float(*noise);
    if (options->momentum != 0) {
        wide ? sgd<double, true>(work, options, noise->threads) : sgd<float, true>(work, options, noise->threads);
    } else {
        wide ? sgd<double, false>(work, options, noise->threads) : sgd<float, false>(work, options, noise->threads);
    }
}

void fastdp_adam_step(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise,
                      const fastdp_adam *options) {
    const fastdp::Work work = fastdp::work_of(tensors, count, tiles, noise);
    const bool plain = !options->maximize && (options->decoupled || options->weight_decay == 0);
    if ((count > 0 && tensors[0].sum_type == FASTDP_FLOAT64) || !fastdp::fits_float(*noise)) {
        adam<double, false>(work, options, noise->threads);
    } else if (plain) {
        adam<float, true>(work, options, noise->threads);
    } else {
        adam<float, false>(work, options, noise->threads);
    }
}

}  // extern "C"
