// What torch asks of any device: its streams and events, its random numbers, and which memory is whose.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

#include "memory.hpp"
#include "streams.hpp"

namespace accelerator {

/// Raises the first error of the tasks since the last synchronization, as a device does.
inline void raise_failure() {
    const std::string what = failure().take();
    TORCH_CHECK(what.empty(), "on the device: ", what);
}

inline void synchronize(Stream& stream) {
    end_of(stream).wait();
    raise_failure();
}

inline void synchronize_device() {
    streams().synchronize();
    raise_failure();
}

/// An event of torch. A wait is for what was recorded last when the wait was issued.
class Event {
  public:
    void record(Stream& stream) {
        auto when = std::make_shared<std::atomic<double>>(0);
        const Mark mark{&stream, stream.submit([when] { *when = milliseconds(); })};
        std::lock_guard lock(mutex_);
        mark_ = mark;
        when_ = std::move(when);
    }
    Mark mark() {
        std::lock_guard lock(mutex_);
        return mark_;
    }
    double when() {
        std::lock_guard lock(mutex_);
        return when_ == nullptr ? 0 : when_->load();
    }

  private:
    static double milliseconds() {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration<double, std::milli>(now).count();
    }

    std::mutex mutex_;
    Mark mark_;
    std::shared_ptr<std::atomic<double>> when_;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device /*device*/) const override {}
    void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}

    c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current_stream()); }
    c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(kDefaultStream); }
    c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*is_high_priority*/) const override {
        return stream_of(streams().next_of_pool());
    }
    c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
        return stream_of(streams().next_of_pool());
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return stream_of(std::exchange(current_stream(), stream.id()));
    }
    bool queryStream(const c10::Stream& stream) const override { return end_of(streams().at(stream.id())).reached(); }
    void synchronizeStream(const c10::Stream& stream) const override { synchronize(streams().at(stream.id())); }
    void synchronizeDevice(c10::DeviceIndex /*device*/) const override { synchronize_device(); }

    void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
                c10::EventFlag /*flag*/) const override {
        if (*event == nullptr) *event = new Event;
        of(*event)->record(streams().at(stream.id()));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr) order_after(streams().at(stream.id()), of(event)->mark());
    }
    bool queryEvent(void* event) const override { return event == nullptr || of(event)->mark().reached(); }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) of(event)->mark().wait();
        raise_failure();
    }
    double elapsedTime(void* begin, void* end, c10::DeviceIndex /*device*/) const override {
        return of(end)->when() - of(begin)->when();
    }
    void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override { delete of(event); }

    void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
        device_memory().recordStream(memory, stream);
    }

  private:
    static Event* of(void* event) { return static_cast<Event*>(event); }
    static c10::Stream stream_of(std::int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

/// The host draws a seed from it for each operator, so random numbers follow from the order in which the host issues
/// operators, whatever the streams do.
struct Generator final : at::CPUGeneratorImpl {
    Generator() : CPUGeneratorImpl(c10::default_rng_seed_val) {
        device_ = kDevice;
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

inline const at::Generator& default_generator() {
    static auto* one = new at::Generator(at::make_generator<Generator>());
    return *one;
}

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }

    bool isPinnedPtr(const void* memory) const override { return host_memory().contains(memory); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
    c10::Device getDeviceFromPtr(void* /*memory*/) const override { return kDevice; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override { return default_generator(); }
    at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
        return at::make_generator<Generator>();
    }

    void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
        c10::DataPtr grown = device_memory().allocate(nbytes);
        const std::size_t kept = std::min(nbytes, storage.nbytes());
        if (kept > 0) {
            const char* from = mapping().shadow(storage.data());
            char* to = mapping().shadow(grown.get());
            here().submit([from, to, kept] { std::memcpy(to, from, kept); });
        }
        storage.set_data_ptr_noswap(std::move(grown));
        storage.set_nbytes(nbytes);
    }
};

}  // namespace accelerator
