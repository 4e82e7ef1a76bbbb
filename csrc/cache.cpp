#include "cache.hpp"

#include <deque>
#include <limits>

namespace elixir {

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int32_t kNone = -1;

class Cache {
  public:
    Cache(const Schedule& schedule, std::int32_t blocks, std::vector<Load>& loads)
        : schedule_(schedule),
          loads_(loads),
          held_(2 * static_cast<std::size_t>(schedule.chunk_count), 0),
          block_of_(held_.size(), kNone),
          came_(held_.size(), 0),
          uses_(held_.size()),
          passed_(held_.size(), 0) {
        for (std::int32_t block = 0; block < blocks; ++block) empty_.push_back(block);
        for (std::size_t entry = 0; entry < schedule.entries; ++entry) {
            if (verb(entry) != Verb::acquire) continue;
            for (std::int32_t i = first(entry); i < last(entry); ++i) {
                uses_[schedule.chunks[i]].push_back(static_cast<std::int64_t>(entry));
            }
        }
    }

    bool play() {
        for (std::size_t entry = 0; entry < schedule_.entries; ++entry) {
            if (verb(entry) == Verb::acquire) {
                if (!acquire(entry)) return false;
                continue;
            }
            for (std::int32_t i = first(entry); i < last(entry); ++i) release(schedule_.chunks[i]);
        }
        return true;
    }

  private:
    Verb verb(std::size_t entry) const { return static_cast<Verb>(schedule_.verbs[entry]); }
    std::int32_t first(std::size_t entry) const { return schedule_.starts[entry]; }
    std::int32_t last(std::size_t entry) const { return schedule_.starts[entry + 1]; }

    bool acquire(std::size_t entry) {
        std::size_t missing = 0;
        for (std::int32_t i = first(entry); i < last(entry); ++i) {
            missing += block_of_[schedule_.chunks[i]] == kNone;
            ++held_[schedule_.chunks[i]];
        }
        if (missing > empty_.size()) {
            std::size_t loose = 0;
            for (const std::int32_t chunk : resident_) loose += held_[chunk] == 0;
            if (missing > empty_.size() + loose) return false;
        }
        for (std::int32_t i = first(entry); i < last(entry); ++i) {
            if (block_of_[schedule_.chunks[i]] == kNone) load(schedule_.chunks[i], static_cast<std::int64_t>(entry));
        }
        return true;
    }

    void load(std::int32_t chunk, std::int64_t now) {
        std::int32_t block, evicted = kNone;
        // If gradients have just left the only empty block, a chunk that is not used again is evicted instead.
        const bool sending = empty_.size() == 1 && empty_.front() == sending_;
        const std::size_t place = empty_.empty() || sending ? farthest(now) : resident_.size();
        if (place == resident_.size() || (sending && next_use(resident_[place], now) != kNever)) {
            block = empty_.front();  // the one empty for longest
            empty_.pop_front();
            resident_.push_back(chunk);
        } else {
            evicted = resident_[place];
            block = block_of_[evicted];
            block_of_[evicted] = kNone;
            resident_[place] = chunk;
        }
        block_of_[chunk] = block;
        came_[chunk] = ++clock_;
        loads_.push_back({chunk, block, evicted});
    }

    // Belady: of the chunks not held, the one whose next use is farthest ahead; of equals, the one that entered first.
    std::size_t farthest(std::int64_t now) {
        std::size_t best = resident_.size();
        std::int64_t best_use = kNone;
        for (std::size_t place = 0; place < resident_.size(); ++place) {
            const std::int32_t chunk = resident_[place];
            if (held_[chunk] != 0) continue;
            const std::int64_t use = next_use(chunk, now);
            if (use > best_use || (use == best_use && came_[chunk] < came_[resident_[best]])) {
                best = place;
                best_use = use;
            }
        }
        return best;
    }

    std::int64_t next_use(std::int32_t chunk, std::int64_t now) {
        std::size_t& passed = passed_[chunk];
        while (passed < uses_[chunk].size() && uses_[chunk][passed] <= now) ++passed;
        return passed < uses_[chunk].size() ? uses_[chunk][passed] : kNever;
    }

    void release(std::int32_t item) {
        if (held_[item] > 0) --held_[item];
        if (item < schedule_.chunk_count || held_[item] != 0 || block_of_[item] == kNone) return;
        sending_ = block_of_[item];
        empty_.push_back(sending_);
        block_of_[item] = kNone;
        for (std::int32_t& other : resident_) {
            if (other != item) continue;
            other = resident_.back();
            resident_.pop_back();
            break;
        }
    }

    const Schedule& schedule_;
    std::vector<Load>& loads_;
    std::vector<std::int32_t> held_;
    std::vector<std::int32_t> block_of_;
    std::vector<std::int64_t> came_;  // when each chunk entered its block
    std::vector<std::vector<std::int64_t>> uses_;
    std::vector<std::size_t> passed_;  // per chunk: number of its uses that are over
    std::vector<std::int32_t> resident_;
    std::deque<std::int32_t> empty_;
    std::int32_t sending_ = kNone;  // the block that gradients left most recently
    std::int64_t clock_ = 0;
};

}  // namespace

bool simulate(const Schedule& schedule, std::int32_t blocks, std::vector<Load>& loads) {
    loads.clear();
    return Cache(schedule, blocks, loads).play();
}

}  // namespace elixir
