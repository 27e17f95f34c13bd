// What tests turn and read of the emulated machine, by ctypes.
#include "cuda_runtime.h"

extern "C" void emulation_reverse(int on) { emulation::reversed = on != 0; }
extern "C" void emulation_fail_next_launch() { emulation::next_error = 1; }
extern "C" int emulation_failed_assertions() {
    const int count = emulation::failed_assertions;
    emulation::failed_assertions = 0;
    return count;
}
