#define REAL double
#define NAME(name) name##_f64
#include "kernel_impl.h"
