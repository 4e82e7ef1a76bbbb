// An accelerator of threads as a backend of torch: registers the device, its operators and its collectives.

#include <torch/csrc/utils/pybind.h>

#include "collectives.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "operators.hpp"
#include "streams.hpp"

using namespace accelerator;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", TORCH_FN(accelerator::empty));
    library.impl("empty_strided", TORCH_FN(accelerator::empty_strided));
    library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    library.impl("unfold", TORCH_FN(at::native::unfold));
    library.impl("_copy_from", TORCH_FN(copy_from));
    library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
    library.impl("record_stream", TORCH_FN(record_stream));
    library.impl("resize_", TORCH_FN(resize));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
    library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    library.impl("native_dropout", TORCH_FN(accelerator::native_dropout));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

PYBIND11_MODULE(_accelerator, module) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    mapping();
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory());

    module.def("synchronize", &synchronize_device, NoGil());
    module.def("delay", [](std::int64_t of_default, std::int64_t of_others, std::uint64_t seed) {
        streams().delay(of_default, of_others, seed);
    });
    module.def("delay_one", [](std::int64_t stream, std::int64_t at_most) { streams().at(stream).delay(at_most, 0); });
    module.def("hold", [](std::int64_t stream, bool held) { streams().at(stream).hold(held); });
    module.def("limit", [](std::size_t nbytes) { device_memory().limit(nbytes); });
    module.def("limit_host", [](std::size_t nbytes) { host_memory().limit(nbytes); });
    module.def("memory_info", [] { return device_memory().memory_info(); });
    module.def("register_host", [](std::uintptr_t memory, std::size_t nbytes) {
        return host_memory().add(reinterpret_cast<void*>(memory), nbytes);
    });
    module.def("unregister_host", [](std::uintptr_t memory) { host_memory().remove(reinterpret_cast<void*>(memory)); });
    module.def("generator", [] { return default_generator(); });
    module.def("counts", [] { return std::pair(counts().issued.load(), counts().waited.load()); });
    module.def("group", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Group>(std::move(gloo));
    });
}
