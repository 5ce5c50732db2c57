// Which instruction sets this machine and this build have, and which one is used.
#pragma once
#include <string>
#include <vector>

#include "kernel_api.h"

namespace hpcdecode {

std::vector<std::string> built_isas();      // worst to best
std::vector<std::string> untested_isas();   // of those, tested under an emulator only
std::vector<std::string> supported_isas();  // of the built ones, what CPU and operating system allow

// `forced` empty: the best one. Throws std::invalid_argument for a name unknown or unsupported here.
const KernelTable& select_isa(const std::string& forced);

}  // namespace hpcdecode
