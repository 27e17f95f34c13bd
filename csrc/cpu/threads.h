// The numbers of threads: OpenMP's, or one thread where the compiler has no OpenMP (Apple's clang).
#pragma once

#ifdef _OPENMP
#include <omp.h>
#else
inline int omp_get_thread_num() { return 0; }
#endif
