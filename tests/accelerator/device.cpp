// An accelerator whose memory is the processor's. Every operation is done by the CPU; what a CUDA device would refuse
// (tensors of two devices in one operation) is refused here too, and draws come from the device's own generators. Copies
// to the host come late, and staging memory is poisoned, where a program could be lucky on a fast machine.
#include <map>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <unistd.h>

#include "device.h"

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 4;

Tensor on_host(const Tensor& t) {
  if (!t.is_privateuseone()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(c10::kCPU).requires_grad(false));
}

namespace {

thread_local DeviceIndex current = 0;

const pid_t opened_by = getpid();

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    TORCH_CHECK(getpid() == opened_by, "Cannot use the fake accelerator in a forked process, as CUDA cannot");
    void* memory = c10::alloc_cpu(n ? n : 1);
    return {memory, memory, &c10::free_cpu, Device(kFake, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator);

// What is read of memory that nothing has come to yet, or that has been given back: no number, and no index either.
void poison(void* memory, size_t n) { memset(memory, 0xFF, n); }
void poison(const Tensor& t) { if (t.is_contiguous()) poison(t.data_ptr(), t.nbytes()); }

struct Pinned final : c10::Allocator {  // poisoned before it is written to, and when it is given back
  c10::DataPtr allocate(size_t n) override {
    void* memory = c10::alloc_cpu(n ? n : 1);
    poison(memory, n);
    std::lock_guard<std::mutex> hold(mutex);
    sizes[memory] = n;
    return {memory, memory, &give_back, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool has(const void* memory) {
    std::lock_guard<std::mutex> hold(mutex);
    return sizes.count(const_cast<void*>(memory)) > 0;
  }
  static void give_back(void* memory);
  std::mutex mutex;
  std::map<void*, size_t> sizes;
};
Pinned& pinned = *new Pinned;  // for tensors that outlive everything

void Pinned::give_back(void* memory) {
  {
    std::lock_guard<std::mutex> hold(pinned.mutex);
    poison(memory, pinned.sizes[memory]);
    pinned.sizes.erase(memory);
  }
  c10::free_cpu(memory);
}

struct Later {  // copies to the host that nothing has waited for
  void add(const Tensor& to, Tensor value) {
    poison(to);
    std::lock_guard<std::mutex> hold(mutex);
    copies.emplace_back(to, std::move(value));
  }
  void settle() {
    std::vector<std::pair<Tensor, Tensor>> due;
    { std::lock_guard<std::mutex> hold(mutex); std::swap(due, copies); }
    for (auto& [to, value] : due) to.copy_(value);
  }
  std::mutex mutex;
  std::vector<std::pair<Tensor, Tensor>> copies;
};
Later& later = *new Later;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kFake;
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device d) const override { auto before = current; current = d.index(); return {kFake, before}; }
  Device getDevice() const override { return {kFake, current}; }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(const DeviceIndex) const override { later.settle(); }
  void synchronizeStream(const c10::Stream&) const override { later.settle(); }
  void synchronizeEvent(void*) const override { later.settle(); }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) made.push_back(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
    return made;
  }();
  return all[index < 0 ? current : index];
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { std::swap(index, current); return index; }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val); }
};

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}
// One that is not waited for comes to the host when the device is waited for. Staging memory is of no use once it has
// been copied to the device.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.is_cpu() && non_blocking) {
    later.add(to, on_host(from).clone());
    return to;
  }
  if (to.is_cpu()) later.settle();
  on_host(to).copy_(on_host(from));
  if (from.is_cpu() && pinned.has(from.data_ptr())) poison(from);
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& t) { later.settle(); return on_host(t).item(); }
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_(self, std::move(storage), 0, c10::SymInt(count), c10::SymInt(1));
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  const std::vector<c10::IValue> before(stack->begin() + first, stack->end());
  const bool by_index = op.schema().name().find("index") != std::string::npos;  // by one of the CPU, as CUDA can
  std::optional<Device> device, other;
  const auto host = [&](const Tensor& t) {
    if (!t.defined()) return t;
    if (t.is_privateuseone() && !device) device = t.device();
    if (t.dim() > 0 && !by_index && t.device() != device) other = t.device();
    return on_host(t);
  };
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = host(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(host(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::make_optional(host(*t)) : t);
      value = list;
    } else if (value.isDevice()) {
      device = value.toDevice();
      value = Device(c10::kCPU);
    }
  }
  c10::OptionalDeviceGuard guard(device);
  const Device here(kFake, current);
  TORCH_CHECK(!other || *other == here, "Expected all tensors to be on the same device, but found at least two devices, ", here, " and ", *other, "! (", op.schema().name(), ")");
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator" && before[i].isNone()) (*stack)[first + i] = default_generator(current);
  for (size_t i = 0; i < arguments.size(); ++i)  // results take what size they have
    if (arguments[i].alias_info() && arguments[i].kwarg_only() && before[i].isTensor())
      (*stack)[first + i] = at::empty_strided({0}, {1}, (*stack)[first + i].toTensor().options());
  const std::vector<c10::IValue> hosts(stack->begin() + first, stack->end());
  op.callBoxed(stack);
  const auto& returns = op.schema().returns();
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), op.schema().name(), " returns a view, which the fake accelerator cannot");
    const auto bring = [&](const Tensor& t) {
      if (!t.defined() || !t.is_cpu()) return t;
      auto moved = at::empty_strided(t.sizes(), t.strides(), t.options().device(here));
      on_host(moved).copy_(t);
      return moved;
    };
    if (alias) {
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* written = arguments[i].alias_info();
        if (!written || *written != *alias || !before[i].isTensor()) continue;
        const Tensor& original = before[i].toTensor();
        const Tensor& result = hosts[i].toTensor();
        if (result.sizes() != original.sizes()) original.resize_(result.sizes());
        if (result.data_ptr() != original.data_ptr()) on_host(original).copy_(result);
        value = original;
      }
    } else if (value.isTensor()) value = bring(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(bring(t));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace
