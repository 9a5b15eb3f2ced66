/* The one place that holds graft's version; CMake reads it from here. */
#ifndef GRAFT_VERSION_H_
#define GRAFT_VERSION_H_
#define GRAFT_VERSION_MAJOR 0
#define GRAFT_VERSION_MINOR 1
#define GRAFT_VERSION_PATCH 0
#define GRAFT_VERSION_STRING "0.1.0"
#endif /* GRAFT_VERSION_H_ */
