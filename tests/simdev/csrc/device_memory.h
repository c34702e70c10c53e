// The device's memory: a caching allocator with CUDA's rules, and a capacity.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace simdev {

c10::DeviceAllocator* device_allocator();
bool is_device_memory(const void* data);
void use_on_stream(const void* data, c10::Stream stream);  // Tensor.record_stream

}  // namespace simdev
