#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

// A CPU tensor on the same memory.
at::Tensor on_host(const at::Tensor& t);

// Of a device; of the current one for -1.
const at::Generator& default_generator(int index);
