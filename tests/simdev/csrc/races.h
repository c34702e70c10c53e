// Whether every access of memory is ordered after those it depends on, by vector clocks.
//
// [Note: races]
// Each kernel, copy and (with poison) free is an access of address ranges by a stream. A stream's clock holds, for every
// stream, the last of its accesses that is ordered before what is enqueued next; events, waits, queries that answered
// yes and host synchronization carry clocks. An access that does not know of an earlier one it depends on (a write of
// what another stream reads or writes, a read of what another stream writes) is a violation, whether or not the bytes
// were wrong this time. Both device memory and pinned host memory are watched; a view counts as its whole extent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simdev {

using Clock = std::vector<uint64_t>;
void merge(Clock& into, const Clock& from);

struct Access {
  uintptr_t begin = 0, end = 0;
  bool write = false;
};

// The last accesses of memory. Not thread-safe: its owner holds a lock.
class AccessLog {
 public:
  // Notes an access by the stream with this number at time `when` of its own; reports a race.
  void add(size_t stream, const Clock& clock, uint64_t when, const char* name, const Access& access);
  void forget(uintptr_t begin, uintptr_t end);

 private:
  struct Touch {
    size_t stream;
    uint64_t when;
    std::string name;
  };
  struct Cell {
    uintptr_t end = 0;
    std::vector<Touch> writes;  // at most one
    std::vector<Touch> reads;   // one of each stream
  };
  void split_at(uintptr_t at);
  std::map<uintptr_t, Cell> cells_;
};

}  // namespace simdev
