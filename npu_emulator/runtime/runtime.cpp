// The runtime as one translation unit: the headers are then parsed once, which more than halves the first-use build.
#include "memory.cpp"
#include "trace.cpp"
#include "policy.cpp"
#include "scheduler.cpp"
#include "streams.cpp"
#include "capture.cpp"
#include "device.cpp"
#include "python_api.cpp"
