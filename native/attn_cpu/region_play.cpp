#include "region_play.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

template <class T>
using Earliest = std::priority_queue<T, std::vector<T>, std::greater<T>>;

class Play {
  public:
    explicit Play(const RegionLoad& load)
        : l_(load),
          layout_(lay_out({load.shape}, load.kv_type, load.block_tokens).front()),
          layer_{load.shape, {}, std::max(1, kPromptItemRows / load.shape.group()), 0},
          rows_(chunks_of(load)),
          prompts_(layer_, select_isa("").prompts[0], rows_, load.threads, load.seconds_per_product) {
        plan_.make(layout_, load.lengths, load.threads);
        for (const auto& [start, count] : load.chunks)
            for (int64_t at = start; at < start + count;) {
                const int64_t end = std::min(start + count, (at / kAppendTokens + 1) * kAppendTokens);
                appends_.insert(appends_.end(), load.shape.kv_heads, end - at);
                at = end;
            }
        const bool waking = worth_waking(prompts_.products(), plan_.bytes);
        for (int thread = 0; thread < (waking ? load.threads : 1); ++thread) free_.push({0, thread});
    }

    std::vector<PlayedItem> run() {
        if (!l_.together)
            for (const WorkKind kind : {kAppend, kAttend}) only(kind);
        while (!free_.empty()) step();
        return std::move(played_);
    }

  private:
    using Thread = std::pair<double, int>;  // when it is free, and which

    static PromptRows chunks_of(const RegionLoad& load) {
        PromptRows rows{};
        for (const auto& [start, count] : load.chunks) rows.chunks.push_back({nullptr, 0, start, count, 0});
        return rows;
    }

    // Lets the thread that is free first take its next item, or leave.
    void step() {
        const auto [now, thread] = free_.top();
        free_.pop();
        settle(now);
        const double rows = next_row_ < plan_.items ? row_seconds(next_row_) : -1;
        switch (next_work(rows, prompts_.next_seconds())) {
            case NextWork::kRows:
                return take(kAttend, thread, now);
            case NextWork::kPrompt:
                return take_prompt(thread, now);
            case NextWork::kAppendOrPrompt:
                return next_append_ < appends_.size() ? take(kAppend, thread, now) : take_prompt(thread, now);
            case NextWork::kAppend:
                if (next_append_ < appends_.size()) take(kAppend, thread, now);
        }
    }

    // Lets all threads do the items of one kind, which is not that of prompts, and wait for each other.
    void only(WorkKind kind) {
        while (kind == kAppend ? next_append_ < appends_.size() : next_row_ < plan_.items) {
            const auto [now, thread] = free_.top();
            free_.pop();
            take(kind, thread, now);
        }
        double end = 0;
        for (const PlayedItem& item : played_) end = std::max(end, item.end);
        Earliest<Thread> after;
        for (; !free_.empty(); free_.pop()) after.push({end, free_.top().second});
        free_ = std::move(after);
    }

    // Notes the items that pack and have come to their end.
    void settle(double now) {
        for (; !packing_.empty() && packing_.top() <= now; packing_.pop()) prompts_.note_packed();
    }

    double row_seconds(int64_t i) const {
        return static_cast<double>(plan_.find(i).item_bytes) * l_.seconds_per_byte + kRowItemSeconds;
    }

    void take(WorkKind kind, int thread, double now) {
        const double seconds = kind == kAttend ? row_seconds(next_row_++)
                                               : static_cast<double>(appends_[next_append_++]) * l_.seconds_per_token;
        play(kind, thread, now, seconds);
    }

    void take_prompt(int thread, double now) {
        const int64_t i = prompts_.take();
        const PromptItems::Item& item = prompts_.item(i);
        if (prompts_.packs(i)) {
            const double seconds = static_cast<double>(item.count) * l_.seconds_per_token;
            packing_.push(now + seconds);
            last_packed_ = std::max(last_packed_, now + seconds);
            return play(kPack, thread, now, seconds);
        }
        play(kPrompt, thread, std::max(now, last_packed_), prompts_.seconds(item));
    }

    void play(WorkKind kind, int thread, double begin, double seconds) {
        played_.push_back({kind, thread, begin, begin + seconds});
        free_.push({begin + seconds, thread});
    }

    const RegionLoad& l_;
    const LayerLayout layout_;
    const PromptLayer layer_;
    const PromptRows rows_;
    PromptItems prompts_;
    AttendPlan plan_;
    std::vector<int64_t> appends_;  // tokens of items
    int64_t next_row_ = 0;
    size_t next_append_ = 0;
    double last_packed_ = 0;
    Earliest<double> packing_;  // ends of items that pack
    Earliest<Thread> free_;
    std::vector<PlayedItem> played_;
};

}  // namespace

std::vector<PlayedItem> play_region(const RegionLoad& load) {
    if (load.threads < 1)
        throw std::invalid_argument("threads: expected 1 at least, got " + std::to_string(load.threads));
    for (const int64_t length : load.lengths)
        if (length < 1) throw std::invalid_argument("lengths: expected 1 at least, got " + std::to_string(length));
    for (const auto& [start, count] : load.chunks)
        if (start < 0 || count < 1)
            throw std::invalid_argument("chunks: expected a first token and 1 token at least, got " +
                                        std::to_string(start) + " and " + std::to_string(count));
    return Play(load).run();
}

}  // namespace hpcdecode
