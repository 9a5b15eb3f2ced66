#define REAL float
#define NAME(name) name##_f32
#include "kernel_impl.h"
