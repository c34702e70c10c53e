// [Note: device memory]
// CUDA's rules: sizes are rounded to 512 bytes, segments of 2 and 20 MiB (``middle_segment``) are split and merged,
// each stream has its own pools, and a freed block is used again at once by its stream. ``record_stream`` delays that
// until the other stream has passed its position. With ``poison`` the owning stream overwrites what is freed. Beyond
// the capacity the device synchronizes, gives free segments back, and then raises torch's own OutOfMemoryError.
#include "device_memory.h"

#include <sys/mman.h>

#include <array>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

namespace simdev {

namespace {

constexpr size_t kRound = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeRound = 2 << 20;
constexpr int kPoison = 0xA5;

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void* map_memory(size_t nbytes) {
  void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

struct Block {
  int device = 0;
  int64_t stream = 0;
  bool small = false, taken = false;
  char* data = nullptr;
  size_t size = 0;
  Block *before = nullptr, *after = nullptr;  // in its segment
  std::vector<c10::Stream> users;
  std::vector<MarkPtr> marks;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->data < b->data;
  }
};

using Key = std::tuple<int, int64_t, bool>;

struct Pools : c10::DeviceAllocator {
  std::recursive_mutex mutex;
  std::map<Key, std::set<Block*, BySize>> free;
  std::unordered_map<const void*, Block*> taken;
  std::map<uintptr_t, size_t> segments;
  std::list<Block*> late;  // freed, but still used by other streams
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats;

  static void change(c10::CachingAllocator::Stat& stat, int64_t by) {
    by >= 0 ? stat.increase(static_cast<size_t>(by)) : stat.decrease(static_cast<size_t>(-by));
  }
  static void note(c10::CachingAllocator::StatArray& stats, bool small, int64_t by) {
    change(stats[0], by);
    change(stats[small ? 1 : 2], by);
  }

  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    synchronize_device(-1);
    std::memcpy(dest, src, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < device_count(); ++device) {
      synchronize_device(device);
      std::lock_guard<std::recursive_mutex> lock(mutex);
      come_back();
      release(device);
    }
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override { use(ptr.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return stats.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (auto* array : arrays(device))
      for (auto& stat : *array) stat.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (auto* array : arrays(device))
      for (auto& stat : *array) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    size_t total = config().capacity > 0 ? static_cast<size_t>(config().capacity) : size_t(64) << 30;
    size_t used = static_cast<size_t>(stats.at(device).reserved_bytes[0].current);
    return {total > used ? total - used : 0, total};
  }

  std::vector<c10::CachingAllocator::StatArray*> arrays(int device) {
    auto& s = stats.at(device);
    return {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
            &s.requested_bytes, &s.inactive_split, &s.inactive_split_bytes};
  }

  void use(const void* data, c10::Stream stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = taken.find(data);
    if (found == taken.end()) return;
    if (stream.id() != found->second->stream) found->second->users.push_back(stream);
  }

  c10::Stream owner(const Block* block) {
    return stream_of(block->device, block->stream);
  }

  // Puts blocks back into their pools that no other stream uses any more.
  void come_back() {
    for (auto at = late.begin(); at != late.end();) {
      auto* block = *at;
      while (!block->marks.empty() && query(block->marks.back())) block->marks.pop_back();
      if (!block->marks.empty()) {
        ++at;
        continue;
      }
      at = late.erase(at);
      put(block);
    }
  }

  void drop(void* data) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = taken.find(data);
    if (found == taken.end()) {
      report_violation("device memory freed twice, or never allocated");
      return;
    }
    auto* block = found->second;
    taken.erase(found);
    auto& s = stats.at(block->device);
    note(s.allocation, block->small, -1);
    note(s.allocated_bytes, block->small, -static_cast<int64_t>(block->size));
    note(s.requested_bytes, block->small, -static_cast<int64_t>(block->size));
    if (!block->users.empty()) {
      for (auto& stream : block->users) block->marks.push_back(record(stream));
      block->users.clear();
      late.push_back(block);
      return;
    }
    put(block);
  }

  void put(Block* block) {
    auto& s = stats.at(block->device);
    note(s.active, block->small, -1);
    note(s.active_bytes, block->small, -static_cast<int64_t>(block->size));
    block->taken = false;
    if (config().poison) {
      // In order with whatever the owner still does with it, as the next user's kernels will be.
      auto* data = block->data;
      auto size = block->size;
      auto begin = reinterpret_cast<uintptr_t>(data);
      enqueue(owner(block), Kind::free, "free", [data, size] { std::memset(data, kPoison, size); },
          {{begin, begin + size, true}});
    }
    auto& pool = free[{block->device, block->stream, block->small}];
    if (auto* next = block->after; next && !next->taken && pool.count(next)) {
      pool.erase(next);
      block->size += next->size;
      block->after = next->after;
      if (block->after) block->after->before = block;
      delete next;
    }
    if (auto* first = block->before; first && !first->taken && pool.count(first)) {
      pool.erase(first);
      first->size += block->size;
      first->after = block->after;
      if (first->after) first->after->before = first;
      delete block;
      block = first;
    }
    pool.insert(block);
  }

  // Gives whole free segments back. Nothing may be pending.
  void release(int device) {
    for (auto& [key, pool] : free) {
      if (std::get<0>(key) != device) continue;
      for (auto at = pool.begin(); at != pool.end();) {
        auto* block = *at;
        if (block->before || block->after) {
          ++at;
          continue;
        }
        at = pool.erase(at);
        auto begin = reinterpret_cast<uintptr_t>(block->data);
        forget_accesses(begin, begin + block->size);
        munmap(block->data, block->size);
        segments.erase(begin);
        note(stats.at(device).segment, block->small, -1);
        note(stats.at(device).reserved_bytes, block->small, -static_cast<int64_t>(block->size));
        stats.at(device).num_device_free++;
        delete block;
      }
    }
  }

  Block* grow(int device, int64_t stream, bool small, size_t size) {
    size_t middle = static_cast<size_t>(config().middle_segment);
    size_t segment = small ? kSmallSegment : size < middle / 2 ? middle : up(size, kLargeRound);
    auto& s = stats.at(device);
    auto fits = [&] {
      int64_t capacity = config().capacity;
      return capacity <= 0 || s.reserved_bytes[0].current + static_cast<int64_t>(segment) <= capacity;
    };
    if (!fits()) {
      s.num_alloc_retries++;
      synchronize_device(device);
      come_back();
      release(device);
      if (!fits()) return nullptr;
    }
    auto* data = static_cast<char*>(map_memory(segment));
    if (!data) return nullptr;
    if (config().poison) std::memset(data, kPoison, segment);
    auto* block = new Block{device, stream, small, false, data, segment};
    segments[reinterpret_cast<uintptr_t>(data)] = segment;
    note(s.segment, small, 1);
    note(s.reserved_bytes, small, static_cast<int64_t>(segment));
    s.num_device_alloc++;
    return block;
  }
};

Pools& pools() {
  static auto* made = new Pools();
  return *made;
}

void drop_device(void* data) {
  if (data) pools().drop(data);
}

c10::DataPtr Pools::allocate(size_t n) {
  int device = current_device();
  c10::Device where(kSim, static_cast<c10::DeviceIndex>(device));
  if (n == 0) return {nullptr, nullptr, &drop_device, where};
  TORCH_CHECK_WITH(OutOfMemoryError, n < (size_t(1) << 46), "simdev out of memory. Tried to allocate ", n, " bytes.");
  int64_t stream = current_stream(device).id();
  std::lock_guard<std::recursive_mutex> lock(mutex);
  come_back();
  size_t size = up(n, kRound);
  bool small = size <= kSmall;
  auto& pool = free[{device, stream, small}];
  Block want{device, stream, small, false, nullptr, size};
  Block* block = nullptr;
  if (auto at = pool.lower_bound(&want); at != pool.end()) {
    block = *at;
    pool.erase(at);
  } else {
    block = grow(device, stream, small, size);
  }
  auto& s = stats.at(device);
  if (!block) {
    s.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "simdev out of memory. Tried to allocate ", c10::CachingAllocator::format_size(size),
        ". ", c10::CachingAllocator::format_size(s.allocated_bytes[0].current), " are allocated, ",
        c10::CachingAllocator::format_size(s.reserved_bytes[0].current), " reserved, of ",
        c10::CachingAllocator::format_size(config().capacity), ".");
  }
  if (block->size - size >= (small ? kRound : kSmall + 1)) {
    auto* rest = new Block{device, stream, small, false, block->data + size, block->size - size, block, block->after};
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    pool.insert(rest);
  }
  block->taken = true;
  taken[block->data] = block;
  note(s.allocation, small, 1);
  note(s.active, small, 1);
  note(s.allocated_bytes, small, static_cast<int64_t>(block->size));
  note(s.active_bytes, small, static_cast<int64_t>(block->size));
  note(s.requested_bytes, small, static_cast<int64_t>(block->size));
  return {block->data, block->data, &drop_device, where};
}

c10::DeleterFnPtr Pools::raw_deleter() const { return &drop_device; }

}  // namespace

c10::DeviceAllocator* device_allocator() { return &pools(); }

bool is_device_memory(const void* data) {
  auto& p = pools();
  std::lock_guard<std::recursive_mutex> lock(p.mutex);
  auto at = reinterpret_cast<uintptr_t>(data);
  auto found = p.segments.upper_bound(at);
  return found != p.segments.begin() && at < std::prev(found)->first + std::prev(found)->second;
}

void use_on_stream(const void* data, c10::Stream stream) { pools().use(data, stream); }

}  // namespace simdev
