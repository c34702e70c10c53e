// The threads and clocks behind streams.h.
#include "streams.h"

#include <ATen/Parallel.h>

#include <array>
#include <chrono>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace simdev {

namespace {

thread_local bool t_worker = false;
thread_local int t_device = 0;
thread_local std::array<int64_t, kMaxDevices> t_streams{};

struct LateError {
  std::mutex mutex;
  std::string what;
};

LateError& late_error() {
  static auto* made = new LateError();
  return *made;
}

int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// How long a kernel or a copy takes, in microseconds, without jitter.
int64_t cost_us(Kind kind, size_t copied) {
  auto& c = config();
  if (kind == Kind::kernel) return c.kernel_delay_us;
  if (kind == Kind::free) return 0;
  int64_t rate = c.copy_bytes_per_s;
  return c.copy_delay_us + (rate > 0 ? static_cast<int64_t>(1e6 * static_cast<double>(copied) / rate) : 0);
}

void pause_us(int64_t microseconds) {
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

int64_t jitter_us() {
  int64_t most = config().jitter_us;
  if (most <= 0) return 0;
  thread_local std::mt19937_64 dice(std::hash<std::thread::id>()(std::this_thread::get_id()));
  return static_cast<int64_t>(dice() % static_cast<uint64_t>(most + 1));
}

// One queue, one thread, in order. The thread begins with the first work and lasts as long as the process.
class Queue {
 public:
  void push(Work work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
      ++enqueued_;
      if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
    }
    more_.notify_one();
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return enqueued_ == done_;
  }

 private:
  void run() {
    t_worker = true;
    for (;;) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        more_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      try {
        work();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(late_error().mutex);
        if (late_error().what.empty()) late_error().what = error.what();
      }
      work = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Work> queue_;
  uint64_t enqueued_ = 0, done_ = 0;
  bool started_ = false;
};

struct StreamState {
  Queue queue;
  size_t number = 0;  // its place in clocks
  int64_t simulated_ns = 0, busy_ns = 0;
  Clock clock;
};

struct Machine {
  std::mutex mutex;  // of everything below
  std::array<std::vector<std::unique_ptr<StreamState>>, kMaxDevices> streams;
  std::array<int64_t, kMaxDevices> handed{};
  size_t stream_count = 0;
  Clock host;  // what the host knows to be done
  int64_t host_ns = 0;
  AccessLog log;

  StreamState& state(c10::Stream stream) {
    auto& all = streams.at(stream.device_index());
    while (all.size() <= static_cast<size_t>(stream.id())) {
      all.push_back(std::make_unique<StreamState>());
      all.back()->number = stream_count++;
    }
    return *all[static_cast<size_t>(stream.id())];
  }

  uint64_t tick(StreamState& stream) {
    merge(stream.clock, host);
    if (stream.clock.size() < stream_count) stream.clock.resize(stream_count);
    return ++stream.clock[stream.number];
  }
};

Machine& machine() {
  static auto* made = new Machine();
  return *made;
}

void finish(const MarkPtr& mark) {
  {
    std::lock_guard<std::mutex> lock(mark->mutex);
    mark->done = true;
    mark->nanoseconds = now_ns();
  }
  mark->changed.notify_all();
}

void await(const MarkPtr& mark) {
  std::unique_lock<std::mutex> lock(mark->mutex);
  mark->changed.wait(lock, [&] { return mark->done; });
}

void let_host_know(const MarkPtr& mark) {
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  merge(m.host, mark->clock);
}

}  // namespace

void forget_accesses(uintptr_t begin, uintptr_t end) {
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.log.forget(begin, end);
}

void raise_late_error() {
  std::string what;
  {
    std::lock_guard<std::mutex> lock(late_error().mutex);
    what.swap(late_error().what);
  }
  TORCH_CHECK(what.empty(), "simdev: a kernel failed after it was enqueued: ", what);
}

int device_count() noexcept { return static_cast<int>(config().devices.load()); }

int current_device() noexcept { return t_device; }

int exchange_device(int index) {
  if (index < 0) return t_device;
  TORCH_CHECK(index < device_count(), "simdev: invalid device ordinal ", index);
  return std::exchange(t_device, index);
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream default_stream(int device) { return stream_of(device < 0 ? t_device : device, 0); }

c10::Stream current_stream(int device) {
  if (device < 0) device = t_device;
  return stream_of(device, t_streams.at(device));
}

c10::Stream new_stream(int device) {
  if (device < 0) device = t_device;
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto made = stream_of(device, 1 + m.handed.at(device)++ % std::max<int64_t>(1, config().stream_pool));
  m.state(made);
  return made;
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  t_streams.at(stream.device_index()) = stream.id();
  return before;
}

void enqueue(c10::Stream stream, Kind kind, const char* name, Work work, const std::vector<Access>& accesses,
             size_t copied) {
  auto& m = machine();
  count(kind == Kind::kernel ? "kernels" : kind == Kind::copy ? "copies" : "frees");
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    auto& state = m.state(stream);
    uint64_t when = m.tick(state);
    if (config().races)
      for (auto& access : accesses) m.log.add(state.number, state.clock, when, name, access);
    int64_t took = 1000 * cost_us(kind, copied);
    state.simulated_ns = std::max(state.simulated_ns, m.host_ns) + took;
    if (kind == Kind::kernel) state.busy_ns += took;
    state.queue.push([kind, copied, work = std::move(work)] {
      if (kind != Kind::free) pause_us(cost_us(kind, copied) + jitter_us());
      if (kind == Kind::kernel) at::init_num_threads();
      work();
    });
  }
  if (config().blocking && kind != Kind::free) synchronize_stream(stream);
}

void run_and_wait(c10::Stream stream, const char* name, const Work& work, const std::vector<Access>& accesses) {
  std::exception_ptr failed;
  auto guarded = [&] {
    try {
      work();
    } catch (...) {
      failed = std::current_exception();
    }
  };
  enqueue(stream, Kind::kernel, name, guarded, accesses);
  synchronize(record(stream));
  if (failed) std::rethrow_exception(failed);
}

MarkPtr record(c10::Stream stream) {
  auto mark = std::make_shared<Mark>();
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto& state = m.state(stream);
  m.tick(state);
  mark->clock = state.clock;
  mark->simulated_ns = state.simulated_ns;
  state.queue.push([mark] { finish(mark); });
  return mark;
}

void wait(c10::Stream stream, const MarkPtr& mark) {
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto& state = m.state(stream);
  merge(state.clock, mark->clock);
  state.simulated_ns = std::max(state.simulated_ns, mark->simulated_ns);
  state.queue.push([mark] { await(mark); });
}

bool query(const MarkPtr& mark) {
  {
    std::lock_guard<std::mutex> lock(mark->mutex);
    if (!mark->done) return false;
  }
  let_host_know(mark);
  return true;
}

void synchronize(const MarkPtr& mark) {
  TORCH_CHECK(!t_worker, "simdev: a kernel waits for its own stream");
  await(mark);
  let_host_know(mark);
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.host_ns = std::max(m.host_ns, mark->simulated_ns);
}

bool is_idle(c10::Stream stream) {
  auto& m = machine();
  StreamState* state = nullptr;
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    state = &m.state(stream);
  }
  return state->queue.is_idle();
}

void synchronize_stream(c10::Stream stream) {
  synchronize(record(stream));
  raise_late_error();
}

void synchronize_device(int device) {
  if (device < 0) device = t_device;
  size_t count = 0;
  {
    auto& m = machine();
    std::lock_guard<std::mutex> lock(m.mutex);
    count = m.streams.at(device).size();
  }
  std::vector<MarkPtr> marks;
  for (size_t id = 0; id < count; ++id) marks.push_back(record(stream_of(device, static_cast<int64_t>(id))));
  for (auto& mark : marks) synchronize(mark);
  raise_late_error();
}

std::pair<int64_t, int64_t> simulated_ns(c10::Stream stream) {
  synchronize_device(stream.device_index());
  auto& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  return {m.host_ns, m.state(stream).busy_ns};
}

void sleep_on(c10::Stream stream, int64_t microseconds) {
  enqueue(stream, Kind::kernel, "sleep", [microseconds] { pause_us(microseconds); }, {});
}

MarkPtr hold(c10::Stream stream) {
  auto mark = std::make_shared<Mark>();
  enqueue(stream, Kind::free, "hold", [mark] { await(mark); }, {});
  return mark;
}

void release(const MarkPtr& mark) { finish(mark); }

}  // namespace simdev
