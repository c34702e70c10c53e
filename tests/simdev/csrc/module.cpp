// What Python sees beyond torch's own interfaces.
#include <torch/csrc/utils/pybind.h>

#include "call.h"
#include "generator.h"
#include "host_memory.h"

namespace simdev {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto without_gil = pybind11::call_guard<pybind11::gil_scoped_release>();
  register_cpu_kernels();
  m.def("configure", &configure);
  m.def("violations", &violations);
  m.def("counters", &counters);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("synchronize", &synchronize_device, without_gil);
  m.def("simulated_ns", [](int device, int64_t stream) { return simulated_ns(stream_of(device, stream)); },
        without_gil);
  m.def("sleep", [](int64_t microseconds) { sleep_on(current_stream(-1), microseconds); });
  pybind11::class_<Mark, MarkPtr>(m, "Mark");
  m.def("hold", [](int device, int64_t stream) { return hold(stream_of(device, stream)); });
  m.def("release", &release);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("manual_seed", [](int device, uint64_t seed) {
    default_generator(static_cast<c10::DeviceIndex>(device)).get<Generator>()->set_current_seed(seed);
  });
  m.def("initial_seed", [](int device) {
    return default_generator(static_cast<c10::DeviceIndex>(device)).get<Generator>()->current_seed();
  });
  m.def("get_rng_state", [](int device) {
    return at::Tensor(default_generator(static_cast<c10::DeviceIndex>(device)).get<Generator>()->get_state());
  });
  m.def("set_rng_state", [](int device, const at::Tensor& state) {
    default_generator(static_cast<c10::DeviceIndex>(device)).get<Generator>()->set_state(*state.unsafeGetTensorImpl());
  });
}

}  // namespace simdev
