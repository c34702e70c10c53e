// Streams, events, and the work enqueued on them.
//
// [Note: streams]
// A stream is a thread with a queue in order. The work holds addresses, never tensors: memory freed too early is used
// again under it, as on a real device. A delay passes before the bytes move, so that a copy-out reads its source as late
// as it may. An event is a mark in a queue.
//
// [Note: simulated time]
// Beside the real time, in which delays are slept, runs one that no busy machine changes: each kernel takes
// kernel_delay_us, each copy copy_delay_us and its bytes at copy_bytes_per_s, a wait ends when what is waited for is
// done, and the host takes no time but where it waits itself.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "config.h"
#include "races.h"

namespace simdev {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

// What happens when everything enqueued on a stream before it is done.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int64_t nanoseconds = 0;
  int64_t simulated_ns = 0;  // [Note: simulated time]
  Clock clock;               // of its stream
};
using MarkPtr = std::shared_ptr<Mark>;

using Work = std::function<void()>;
enum class Kind { kernel, copy, free };  // a free has no delay

int device_count() noexcept;
int current_device() noexcept;
int exchange_device(int index);
c10::Stream current_stream(int device);  // of this thread; -1: of the current device
c10::Stream default_stream(int device);
c10::Stream new_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream stream_of(int device, int64_t id);

// `copied`: how many bytes a copy moves.
void enqueue(c10::Stream stream, Kind kind, const char* name, Work work, const std::vector<Access>& accesses,
             size_t copied = 0);
// Enqueues and waits; throws what the work throws.
void run_and_wait(c10::Stream stream, const char* name, const Work& work, const std::vector<Access>& accesses);
MarkPtr record(c10::Stream stream);
void wait(c10::Stream stream, const MarkPtr& mark);
bool query(const MarkPtr& mark);
void synchronize(const MarkPtr& mark);
bool is_idle(c10::Stream stream);
void synchronize_stream(c10::Stream stream);
void synchronize_device(int device);
// Waits for the device; returns the simulated time, and how long kernels of one of its streams took in it.
std::pair<int64_t, int64_t> simulated_ns(c10::Stream stream);
void sleep_on(c10::Stream stream, int64_t microseconds);
// Keeps a stream from going on until it is released: a test that needs a late stream needs no clock.
MarkPtr hold(c10::Stream stream);
void release(const MarkPtr& mark);

void forget_accesses(uintptr_t begin, uintptr_t end);  // the memory went back to the system
void raise_late_error();                               // what a kernel threw on its stream

}  // namespace simdev
