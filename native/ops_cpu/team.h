// Parallel work on the OpenMP threads that torch's matrix products use, so that a program starts on warm threads.
#pragma once

namespace hpcdecode::ops {

// Calls work(data, part, parts) for part 0 .. parts - 1 at once, one a thread, with parts <= threads.
// Without an OpenMP runtime in the process the calling thread does all.
void run_team(int threads, void (*work)(void* data, int part, int parts), void* data);

}  // namespace hpcdecode::ops
