#pragma once

// LOCKSTEP_AVX2 marks a function that is compiled for AVX2, FMA and F16C and
// may be called only where `has_avx2()` holds.
#ifdef __x86_64__
#define LOCKSTEP_AVX2 [[gnu::target("avx2,fma,f16c")]]
// The same with an instruction that asks for lines to write to; a CPU without
// it does nothing there.
#define LOCKSTEP_AVX2_PREFETCHW [[gnu::target("avx2,fma,f16c,prfchw")]]
#endif

namespace lockstep::comm::kernels {

#ifdef __x86_64__
inline bool has_avx2() noexcept {
  static const bool has = __builtin_cpu_supports("avx2") &&
                          __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}
#endif

}  // namespace lockstep::comm::kernels
