#pragma once
// __half as the kernels use it: stored and converted, never computed with.

#include "../small_float.h"

SMALL_FLOAT(__half, __half2, 10, half, half)
typedef __half half;
typedef __half2 half2;
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
