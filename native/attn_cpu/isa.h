// The instruction sets of this machine and this build, and the choice of one.
#pragma once
#include <string>
#include <vector>

#include "kernel_api.h"

namespace hpcdecode {

std::vector<std::string> built_isas();      // worst first
std::vector<std::string> untested_isas();   // of the built ones, those tested under an emulator only
std::vector<std::string> supported_isas();  // of the built ones, those that CPU and system allow

// Returns the kernels of `forced`, or of the best instruction set for an empty name. Throws std::invalid_argument for a
// name that is unknown or unsupported here.
const KernelTable& select_isa(const std::string& forced);

}  // namespace hpcdecode
