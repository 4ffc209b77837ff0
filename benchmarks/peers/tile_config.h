/* Included before every file of llama.cpp: GCC before 12.4 and 13.3 (its bug 114098) says that
   _tile_loadconfig reads 8 bytes of the 64 it reads, and drops the stores of the others. On
   processors with AMX the first product then faults. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
static inline void load_tile_config(const void *config) {
  __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const char(*)[64])config));
}
#define _tile_loadconfig load_tile_config
#endif
