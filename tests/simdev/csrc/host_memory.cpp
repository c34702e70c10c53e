// The allocator and the registrations behind host_memory.h.
#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>

namespace simdev {

namespace {

constexpr int kPoison = 0x5A;
constexpr size_t kPage = 4096;

struct HostBlock {
  char* data = nullptr;
  size_t size = 0;
  std::vector<MarkPtr> marks;
};

struct Host : at::HostAllocator {
  std::mutex mutex;
  std::map<uintptr_t, HostBlock*> blocks;       // all of the allocator's own, by address
  std::map<uintptr_t, size_t> registered;       // somebody else's memory, pinned
  std::multimap<size_t, HostBlock*> free;
  std::list<HostBlock*> late;
  struct Copy {
    uintptr_t begin, end;
    MarkPtr mark;
  };
  std::list<Copy> copies;  // asynchronous copies that may still run
  at::HostStats stats;

  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
  bool record_event(void* ptr, void*, c10::Stream stream) override {
    return used(reinterpret_cast<uintptr_t>(ptr), 1, stream);
  }
  void empty_cache() override {
    for (int device = 0; device < device_count(); ++device) synchronize_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    come_back();
    for (auto& [size, block] : free) {
      forget_accesses(reinterpret_cast<uintptr_t>(block->data), reinterpret_cast<uintptr_t>(block->data) + size);
      blocks.erase(reinterpret_cast<uintptr_t>(block->data));
      munmap(block->data, std::max(block->size, kPage));
      delete block;
    }
    free.clear();
  }
  at::HostStats get_stats() override { return stats; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool used(uintptr_t begin, size_t nbytes, c10::Stream stream) {
    auto mark = record(stream);
    std::lock_guard<std::mutex> lock(mutex);
    for (auto at = copies.begin(); at != copies.end();) at = query(at->mark) ? copies.erase(at) : std::next(at);
    copies.push_back({begin, begin + nbytes, mark});
    auto found = blocks.upper_bound(begin);
    if (found == blocks.begin()) return false;
    auto* block = std::prev(found)->second;
    if (begin >= reinterpret_cast<uintptr_t>(block->data) + block->size) return false;
    block->marks.push_back(mark);
    return true;
  }

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
  void put(HostBlock* block) {
    if (config().poison) std::memset(block->data, kPoison, block->size);
    free.emplace(block->size, block);
  }
  void drop(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(reinterpret_cast<uintptr_t>(data));
    if (found == blocks.end()) return report_violation("pinned memory freed twice, or never allocated");
    late.push_back(found->second);
    come_back();
  }
};

Host& host() {
  static auto* made = new Host();
  return *made;
}

void drop_host(void* data) {
  if (data) host().drop(data);
}

c10::DataPtr Host::allocate(size_t n) {
  if (n == 0) return {nullptr, nullptr, &drop_host, c10::Device(c10::kCPU)};
  size_t size = 512;
  while (size < n) size *= 2;
  std::lock_guard<std::mutex> lock(mutex);
  come_back();
  HostBlock* block = nullptr;
  if (auto found = free.find(size); found != free.end()) {
    block = found->second;
    free.erase(found);
  } else {
    void* mapped =
        mmap(nullptr, std::max(size, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "simdev: no pinned memory of ", size, " bytes");
    auto* data = static_cast<char*>(mapped);
    if (config().poison) std::memset(data, kPoison, size);
    block = new HostBlock{data, size};
    blocks[reinterpret_cast<uintptr_t>(data)] = block;
  }
  return {block->data, block->data, &drop_host, c10::Device(c10::kCPU)};
}

c10::DeleterFnPtr Host::raw_deleter() const { return &drop_host; }

bool inside(const std::map<uintptr_t, size_t>& ranges, const void* data) {
  auto at = reinterpret_cast<uintptr_t>(data);
  auto found = ranges.upper_bound(at);
  return found != ranges.begin() && at < std::prev(found)->first + std::prev(found)->second;
}

}  // namespace

at::HostAllocator* host_allocator() { return &host(); }

bool is_pinned(const void* data) {
  auto& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  if (inside(h.registered, data)) return true;
  auto at = reinterpret_cast<uintptr_t>(data);
  auto found = h.blocks.upper_bound(at);
  return found != h.blocks.begin() && at < std::prev(found)->first + std::prev(found)->second->size;
}

bool is_registered(const void* data) {
  auto& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  return inside(h.registered, data);
}

void note_host_copy(const void* data, size_t nbytes, c10::Stream stream) {
  host().used(reinterpret_cast<uintptr_t>(data), nbytes, stream);
}

int register_host(uintptr_t address, size_t nbytes) {
  auto& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  for (auto& [begin, size] : h.registered)
    if (address < begin + size && begin < address + nbytes) return 712;  // cudaErrorHostMemoryAlreadyRegistered
  h.registered[address] = nbytes;
  count("registrations");
  return 0;
}

int unregister_host(uintptr_t address) {
  auto& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  auto found = h.registered.find(address);
  if (found == h.registered.end()) return 713;  // cudaErrorHostMemoryNotRegistered
  for (auto& copy : h.copies)
    if (copy.begin < address + found->second && address < copy.end && !query(copy.mark))
      report_violation("pinned memory unregistered while a copy uses it");
  forget_accesses(address, address + found->second);
  h.registered.erase(found);
  return 0;
}

}  // namespace simdev
