// What torch's generic code asks of a device: guard, hooks, allocators, generator.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <vector>

#include "device_memory.h"
#include "generator.h"
#include "host_memory.h"

namespace simdev {

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) all->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

namespace {

struct Event {
  std::mutex mutex;
  MarkPtr mark;
  bool timed = false;
  c10::DeviceIndex device = -1;
};

MarkPtr mark_of(void* event) {
  auto* found = static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(found->mutex);
  return found->mark;
}

void refuse_in_capture() {
  TORCH_CHECK(!config().capturing, "simdev: operation not permitted when stream is capturing");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return at(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < device_count()) exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    count(flag == c10::EventFlag::BACKEND_DEFAULT ? "events_timed" : "events_untimed");
    if (!*event) {
      auto* made = new Event();
      made->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = made;
    }
    auto* found = static_cast<Event*>(*event);
    auto mark = simdev::record(stream);
    std::lock_guard<std::mutex> lock(found->mutex);
    found->mark = mark;
    found->device = stream.device_index();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    if (auto mark = mark_of(event)) simdev::wait(stream, mark);
  }
  bool isStreamCapturing(const c10::Stream&) const override { return config().capturing; }
  bool queryEvent(void* event) const override {
    refuse_in_capture();
    if (!event) return true;
    auto mark = mark_of(event);
    return !mark || query(mark);
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture();
    count("host_waits");
    if (!event) return;
    if (auto mark = mark_of(event)) synchronize(mark);
    raise_late_error();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(config().timed_events, "Backend doesn't support elapsedTime.");
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(
        static_cast<Event*>(first)->timed && static_cast<Event*>(second)->timed,
        "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(static_cast<Event*>(first)->device == static_cast<Event*>(second)->device,
                "simdev: invalid resource handle: the events are of two devices");
    auto a = mark_of(first), b = mark_of(second);
    TORCH_CHECK(a && b && query(a) && query(b), "simdev: an event has not happened yet");
    return static_cast<double>(b->nanoseconds - a->nanoseconds) / 1e6;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  bool queryStream(const c10::Stream& stream) const override {
    if (!is_idle(stream)) return false;
    synchronize_stream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("host_waits");
    synchronize_stream(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count("host_waits");
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data.get(), stream);
  }

 private:
  static c10::Device at(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_device_memory(data), "simdev: no device memory");
    return {kSim, 0};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    c10::DataPtr fresh;
    if (nbytes > 0) {
      fresh = device_allocator()->allocate(nbytes);
      size_t kept = std::min(nbytes, impl->nbytes());
      if (kept && impl->data()) {
        auto from = reinterpret_cast<uintptr_t>(impl->data()), to = reinterpret_cast<uintptr_t>(fresh.get());
        auto *source = static_cast<const char*>(impl->data());
        auto* target = static_cast<char*>(fresh.get());
        enqueue(current_stream(-1), Kind::kernel, "resize", [=] { std::memcpy(target, source, kept); },
            {{from, from + kept, false}, {to, to + kept, true}});
      }
    } else {
      fresh = c10::DataPtr(nullptr, c10::Device(kSim, static_cast<c10::DeviceIndex>(current_device())));
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

struct Registered {
  Registered() {
    static Guard guard;
    c10::impl::registerDeviceGuard(kSim, &guard);
    c10::SetAllocator(kSim, device_allocator());
    at::setHostAllocator(kSim, host_allocator());
    static auto* hooks = new Hooks();
    at::RegisterPrivateUse1HooksInterface(hooks);
  }
} g_registered;

}  // namespace

}  // namespace simdev
