// How much of their time the threads of parallel work have something to do.
#pragma once
#include <chrono>
#include <vector>

namespace hpcdecode {

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class ThreadClock {
  public:
    explicit ThreadClock(int threads) : own_(threads) {}

    // Counts that a thread worked.
    void add(int thread, double seconds) { own_[thread].seconds += seconds; }
    // Counts the seconds of a call, which all threads had.
    void add_call(double seconds) { calls_ += seconds; }

    double thread_seconds() const { return calls_ * static_cast<double>(own_.size()); }
    double busy_seconds() const {
        double sum = 0;
        for (const Own& own : own_) sum += own.seconds;
        return sum;
    }

  private:
    struct alignas(64) Own {
        double seconds = 0;
    };
    std::vector<Own> own_;
    double calls_ = 0;
};

}  // namespace hpcdecode
