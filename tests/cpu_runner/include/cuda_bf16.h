#pragma once
// __nv_bfloat16 as the kernels use it: stored and converted, never computed with.

#include "../small_float.h"

SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162, 7, bfloat16, bfloat16)
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
