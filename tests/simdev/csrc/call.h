// One operator call, ready for a stream: CPU tensors over device memory in place of the arguments, the accesses of memory
// it makes, and the key under which the shapes of its results are known.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace simdev {

using c10::IValue;
using torch::jit::Stack;

// Makes CPU tensors over device memory; tensors of one storage get one storage again.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::unordered_map<const void*, c10::Storage> storages_;
};

size_t extent_bytes(at::IntArrayRef sizes, at::IntArrayRef strides, size_t item);
Access access_of(const at::Tensor& tensor, bool write);
bool is_simulated(const at::Tensor& tensor);
at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  Stack given;               // the arguments
  std::vector<bool> writes;  // which of them the operator writes
  int device = -1;
  Aliases aliases;
  Stack on_cpu;  // the kernel's arguments
  std::vector<Access> accesses;
  std::vector<at::Tensor> written, written_alias;  // in order of arguments, tensors of lists included
  bool lists_written = false;
  bool foreign = false;  // a CPU tensor with dimensions is among the arguments

  Call(const c10::OperatorHandle& handle, Stack arguments);
  void prepare();
  // Whether an index is a mask: the shape then depends on its values.
  bool has_masks() const;
  // No key: the call has an argument that cannot be part of one.
  std::optional<std::string> key() const;

 private:
  void find_device(const IValue& value);
  IValue convert(const IValue& value, bool write);
};

// Runs the CPU kernel; its results replace the arguments on the stack.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack);
// Runs the operator on the device, in kernels.cpp.
void run(const c10::OperatorHandle& op, Stack* stack);
// Registers the CPU's kernels where torch would take one composed of other operators: once all files' own are known.
void register_cpu_kernels();

}  // namespace simdev
