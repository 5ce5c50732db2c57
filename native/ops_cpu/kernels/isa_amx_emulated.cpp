// The kernels of isa_amx.cpp over tiles that are emulated, for tests on machines without AMX.
#define HPCDECODE_EMULATE_TILES
#include "isa_amx.cpp"
