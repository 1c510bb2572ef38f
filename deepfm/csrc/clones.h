// What the loops of the kernels have in common.
#ifndef DEEPFM_CSRC_CLONES_H_
#define DEEPFM_CSRC_CLONES_H_

// Compiled for several processors, of which the loader takes the best one that is there: what is
// built on one machine runs on another one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DEEPFM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DEEPFM_CLONES
#endif

#endif  // DEEPFM_CSRC_CLONES_H_
