// Streams: each is a thread that runs its tasks in order, after random delays. Knows no tensors and no memory.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace accelerator {

using Task = std::function<void()>;

constexpr std::int64_t kDefaultStream = 0;
/// As on CUDA, `torch.Stream` hands out the streams of a pool in turn.
constexpr std::int64_t kPool = 32;
/// One task in so many of the default stream, which has by far the most, is late; of other streams, all are.
constexpr std::uint64_t kOneIn = 4;
/// Streams of process groups have numbers from here on.
constexpr std::int64_t kFirstOwn = 1000;
/// A delay of tasks until somebody waits for them: a stream, or the host.
constexpr std::int64_t kUntilAwaited = -1;

/// The first error of a task, until a synchronization raises it.
class Failure {
  public:
    void keep(const std::string& what) {
        std::lock_guard lock(mutex_);
        if (what_.empty()) what_ = what;
    }
    std::string take() {
        std::lock_guard lock(mutex_);
        return std::exchange(what_, {});
    }

  private:
    std::mutex mutex_;
    std::string what_;
};

inline Failure& failure() {
    static auto* one = new Failure;  // never destroyed: the threads outlive every static object
    return *one;
}

class Stream {
  public:
    explicit Stream(std::int64_t id) : id(id), random_(static_cast<std::uint64_t>(id)) {
        std::thread([this] { run(); }).detach();
    }

    const std::int64_t id;

    /// Returns the number of the task; the first has number 1.
    std::uint64_t submit(Task task) {
        std::uint64_t number = 0;
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
            number = ++submitted_;
        }
        changed_.notify_all();
        return number;
    }
    std::uint64_t submitted() {
        std::lock_guard lock(mutex_);
        return submitted_;
    }
    bool reached(std::uint64_t number) {
        std::lock_guard lock(mutex_);
        return ended_ >= number;
    }
    void wait(std::uint64_t number) {
        std::unique_lock lock(mutex_);
        if (awaited_ < number) {
            awaited_ = number;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return ended_ >= number; });
    }

    /// Later tasks begin at random up to so many microseconds late, or as late as `kUntilAwaited` says.
    void delay(std::int64_t at_most, std::uint64_t seed) {
        {
            std::lock_guard lock(mutex_);
            delay_ = at_most;
            random_.seed(seed * 2 * kFirstOwn + static_cast<std::uint64_t>(id));
        }
        changed_.notify_all();
    }
    /// While a stream is held, it begins no task.
    void hold(bool held) {
        {
            std::lock_guard lock(mutex_);
            held_ = held;
        }
        changed_.notify_all();
    }

  private:
    void run() {
        for (;;) {
            Task task = next();
            try {
                task();
            } catch (const std::exception& error) {
                failure().keep(error.what());
            }
            task = nullptr;  // what it owns is freed before anybody learns that it has ended
            {
                std::lock_guard lock(mutex_);
                ++ended_;
            }
            changed_.notify_all();
        }
    }
    bool may_begin() const { return !held_ && !tasks_.empty() && (delay_ != kUntilAwaited || ended_ < awaited_); }
    Task next() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return may_begin(); });
        if (delay_ > 0 && (id != kDefaultStream || random_() % kOneIn == 0)) {
            const std::chrono::microseconds late(random_() % static_cast<std::uint64_t>(delay_));
            lock.unlock();
            std::this_thread::sleep_for(late);
            lock.lock();
        }
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        return task;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    std::uint64_t submitted_ = 0;
    std::uint64_t ended_ = 0;
    std::uint64_t awaited_ = 0;
    std::int64_t delay_ = 0;
    bool held_ = false;
    std::mt19937_64 random_;
};

/// A point in a stream: the end of one of its tasks.
struct Mark {
    Stream* stream = nullptr;
    std::uint64_t number = 0;

    bool reached() const { return stream == nullptr || stream->reached(number); }
    void wait() const {
        if (stream != nullptr) stream->wait(number);
    }
};

/// All streams of the device, each made at its first use and never destroyed.
class Streams {
  public:
    Stream& at(std::int64_t id) {
        std::lock_guard lock(mutex_);
        return made(id);
    }
    std::int64_t next_of_pool() {
        std::lock_guard lock(mutex_);
        return 1 + next_of_pool_++ % kPool;
    }
    Stream& add() {
        std::lock_guard lock(mutex_);
        return made(next_own_++);
    }
    /// Delays the default stream and all others, those that are yet to be made too.
    void delay(std::int64_t of_default, std::int64_t of_others, std::uint64_t seed) {
        std::lock_guard lock(mutex_);
        delay_of_default_ = of_default;
        delay_of_others_ = of_others;
        seed_ = seed;
        for (auto& [id, stream] : streams_) delay(*stream);
    }
    void synchronize() {
        std::map<std::int64_t, Stream*> all;
        {
            std::lock_guard lock(mutex_);
            all = streams_;
        }
        for (auto& [id, stream] : all) stream->wait(stream->submitted());
    }

  private:
    void delay(Stream& stream) const {
        stream.delay(stream.id == kDefaultStream ? delay_of_default_ : delay_of_others_, seed_);
    }
    Stream& made(std::int64_t id) {
        Stream*& stream = streams_[id];
        if (stream == nullptr) {
            stream = new Stream(id);
            delay(*stream);
        }
        return *stream;
    }

    std::mutex mutex_;
    std::map<std::int64_t, Stream*> streams_;
    std::int64_t next_of_pool_ = 0;
    std::int64_t next_own_ = kFirstOwn;
    std::int64_t delay_of_default_ = 0;
    std::int64_t delay_of_others_ = 0;
    std::uint64_t seed_ = 0;
};

inline Streams& streams() {
    static auto* one = new Streams;
    return *one;
}

/// The number of this thread's current stream.
inline std::int64_t& current_stream() {
    static thread_local std::int64_t id = kDefaultStream;
    return id;
}

inline Stream& here() {
    return streams().at(current_stream());
}

/// The end of everything that `stream` has been given so far.
inline Mark end_of(Stream& stream) {
    return {&stream, stream.submitted()};
}

/// Later tasks of `stream` begin after `mark`.
inline void order_after(Stream& stream, Mark mark) {
    if (mark.stream != nullptr && mark.stream != &stream) stream.submit([mark] { mark.wait(); });
}

}  // namespace accelerator
