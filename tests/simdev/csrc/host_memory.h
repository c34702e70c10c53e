// Pinned host memory: torch's allocator of it for this device, and registration of memory that is there already.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "streams.h"

namespace simdev {

at::HostAllocator* host_allocator();
bool is_pinned(const void* data);
bool is_registered(const void* data);  // pinned as memory that was there already, not by torch's allocator
// Notes that an asynchronous copy enqueued on `stream` uses this pinned memory.
void note_host_copy(const void* data, size_t nbytes, c10::Stream stream);
// Both return 0 or the number of CUDA's error.
int register_host(uintptr_t address, size_t nbytes);
int unregister_host(uintptr_t address);

}  // namespace simdev
