// Operators: torch's own for CPUs, run later by the current stream.
//
// An operator is first run on the meta device, which checks its arguments and tells the shapes of its results. Memory
// for these is allocated, and the stream gets the task of running the operator for CPUs on the shadow of that memory.
// Where a result's shape or value depends on data, the host waits for the stream, as it does on CUDA.

#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device.hpp"
#include "shapes.hpp"

namespace accelerator {

/// How many operators were issued, and for how many of them the host has waited.
struct Counts {
    std::atomic<std::int64_t> issued{0};
    std::atomic<std::int64_t> waited{0};
};
inline Counts& counts() {
    static auto* one = new Counts;
    return *one;
}

inline bool is_ours(const at::Tensor& t) {
    return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1;
}

/// The same memory as a tensor of the CPU; whoever uses it owns nothing.
inline at::Tensor shadow_of(const at::Tensor& t) {
    if (!is_ours(t)) return t;
    void* memory = t.storage().nbytes() == 0 ? nullptr : mapping().shadow(t.data_ptr());
    return at::from_blob(memory, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

inline at::Tensor meta_of(const at::Tensor& t) {
    if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // a number does not set the dtype
    return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
}

/// Device memory of the same shape, with garbage in it.
inline at::Tensor allocate_like(const at::Tensor& t) {
    if (!t.defined()) return t;
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice));
}

/// An argument or a result with each of its tensors replaced by `f` of it, and the device by `device`.
template <class F>
c10::IValue mapped(const c10::IValue& value, F f, c10::Device device) {
    if (value.isTensor()) return f(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) list.push_back(f(t));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector()) {
            list.push_back(t.has_value() ? std::optional(f(*t)) : std::nullopt);
        }
        return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return device;
    return value;
}

inline bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    const auto& type = optional == nullptr ? argument.type() : optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
}

/// A generator for one operator, seeded by the device's or the caller's.
inline at::Generator seeded(const c10::IValue& given) {
    at::Generator source = given.isNone() ? default_generator() : given.toGenerator();
    TORCH_CHECK(source.device() == kDevice, "expected a generator of ", kDevice, ", got one of ", source.device());
    std::lock_guard lock(source.mutex());
    return at::detail::createCPUGenerator(source.get<Generator>()->random64());
}

/// One call of an operator.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Values* stack)
        : op_(op), schema_(op.schema()), given_(stack->end() - static_cast<std::ptrdiff_t>(arguments()), stack->end()) {
        torch::jit::drop(*stack, arguments());
        for (std::size_t i = 0; i < arguments(); ++i) {
            const c10::IValue& value = given_[i];
            const bool random = is_generator(schema_.arguments()[i]);
            on_cpu_.push_back(random ? c10::IValue(seeded(value)) : mapped(value, shadow_of, at::kCPU));
        }
    }

    void run(Values* stack) {
        ++counts().issued;
        if (const auto shapes = this->shapes()) {
            resize_outputs(shapes->arguments);
            submit(shapes->results, stack);
        } else {
            ++counts().waited;
            run_now(stack);
        }
    }

  private:
    std::size_t arguments() const { return schema_.arguments().size(); }

    /// Whether an index is a mask, so that its elements must be counted.
    bool has_mask() const {
        for (const c10::IValue& value : given_) {
            if (!value.isOptionalTensorList()) continue;
            for (const auto& t : value.toOptionalTensorVector()) {
                if (t.has_value() && t->defined() && c10::isIntegralType(t->scalar_type(), true) &&
                    t->itemsize() == 1) {
                    return true;
                }
            }
        }
        return false;
    }

    /// What the operator makes of the shapes of its arguments; null if its results depend on data.
    ShapeCache::Found shapes() const {
        if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) return nullptr;
        if (has_mask()) return nullptr;
        Values on_meta;
        for (std::size_t i = 0; i < arguments(); ++i) {
            const bool random = is_generator(schema_.arguments()[i]);
            on_meta.push_back(random ? c10::IValue() : mapped(given_[i], meta_of, at::kMeta));
        }
        return shape_cache().of(op_, std::move(on_meta));
    }

    /// Gives an argument such as `out` the size that the operator gives it.
    void resize_outputs(const Values& meta_arguments) {
        for (std::size_t i = 0; i < arguments(); ++i) {
            const auto* alias = schema_.arguments()[i].alias_info();
            if (alias == nullptr || !alias->isWrite() || !given_[i].isTensor() || !is_ours(given_[i].toTensor())) {
                continue;
            }
            const auto sizes = meta_arguments[i].toTensor().sizes();
            if (given_[i].toTensor().sizes() != sizes) {
                given_[i].toTensor().resize_(sizes);
                on_cpu_[i] = shadow_of(given_[i].toTensor());
            }
        }
    }

    /// The argument that a result is; -1 if it is a new one.
    int argument_of(std::size_t result) const {
        const auto* alias = schema_.returns()[result].alias_info();
        if (alias == nullptr || !alias->isWrite()) return -1;
        for (std::size_t i = 0; i < arguments(); ++i) {
            const auto* other = schema_.arguments()[i].alias_info();
            if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
        }
        return -1;
    }

    void submit(const Values& on_meta, Values* stack) {
        std::vector<at::Tensor> places;  // shadows of the new results, in order
        std::vector<bool> is_new;
        for (std::size_t i = 0; i < on_meta.size(); ++i) {
            const int argument = argument_of(i);
            is_new.push_back(argument < 0);
            if (argument >= 0) {
                stack->push_back(given_[argument]);
                continue;
            }
            const auto allocated = [&places](const at::Tensor& t) {
                at::Tensor result = allocate_like(t);
                places.push_back(shadow_of(result));
                return result;
            };
            stack->push_back(mapped(on_meta[i], allocated, kDevice));
        }
        here().submit([op = op_, values = std::move(on_cpu_), places = std::move(places),
                       is_new = std::move(is_new)]() mutable { compute(op, values, places, is_new); });
    }

    /// The backward of the layer norm gets statistics in fp32 where torch has decomposed the forward, and refuses them.
    static void correct_statistics(const c10::OperatorHandle& op, Values& values) {
        if (op.schema().name() != "aten::native_layer_norm_backward") return;
        const bool has_weight = values[5].isTensor() && values[5].toTensor().defined();
        const auto dtype = values[has_weight ? 5 : 1].toTensor().scalar_type();
        for (const std::size_t i : {3, 4}) values[i] = values[i].toTensor().to(dtype);
    }

    /// The task: runs the operator for CPUs and moves its new results to their places.
    static void compute(const c10::OperatorHandle& op, Values& values, const std::vector<at::Tensor>& places,
                        const std::vector<bool>& is_new) {
        at::internal::lazy_init_num_threads();  // else OpenMP gives this thread a team of its own
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        correct_statistics(op, values);
        try {
            op.callBoxed(&values);
        } catch (const c10::Error& error) {
            throw std::runtime_error(op.schema().name() + ": " + error.what_without_backtrace());
        }
        auto place = places.begin();
        const auto move = [&place](const at::Tensor& t) {
            const at::Tensor& to = *place++;
            if (to.defined() && t.defined()) to.copy_(t);
        };
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (!is_new[i]) continue;
            if (values[i].isTensor()) move(values[i].toTensor());
            if (!values[i].isTensorList()) continue;
            for (const at::Tensor& t : values[i].toTensorVector()) move(t);
        }
    }

    void run_now(Values* stack) {
        synchronize(here());
        {
            at::AutoDispatchBelowADInplaceOrView below_autograd;
            op_.callBoxed(&on_cpu_);
        }
        const auto moved = [](const at::Tensor& t) {
            at::Tensor result = allocate_like(t);
            if (t.defined()) {
                synchronize(here());  // the garbage is written first
                shadow_of(result).copy_(t);
            }
            return result;
        };
        for (std::size_t i = 0; i < on_cpu_.size(); ++i) {
            const int argument = argument_of(i);
            stack->push_back(argument >= 0 ? given_[argument] : mapped(on_cpu_[i], moved, kDevice));
        }
    }

    const c10::OperatorHandle& op_;
    const c10::FunctionSchema& schema_;
    Values given_;
    Values on_cpu_;
};

inline void run_operator(const c10::OperatorHandle& op, Values* stack) {
    Call(op, stack).run(stack);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(sizes, &device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(sizes, strides, &device_memory(), kKeys, c10::dtype_or_default(dtype));
}

/// The host's side of a copy. A task owns it, unless only a registration has locked its pages.
inline at::Tensor host_side(const at::Tensor& t) {
    if (!host_memory().is_registered(t.data_ptr())) return t.detach();
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
}

/// Copies by CUDA's rules: the host waits for a copy to or from it, unless it is `non_blocking` and not to pageable
/// memory. Pageable memory that is copied to the device may change as soon as the call returns.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    if (from.numel() == 0 || to.numel() == 0) return to;
    const bool is_local = is_ours(from) && is_ours(to);
    const at::Tensor& host = is_ours(from) ? to : from;
    const bool is_locked = !is_local && host_memory().contains(host.data_ptr());
    const bool is_staged = !is_ours(from) && !is_locked;
    at::Tensor source = is_ours(from) ? shadow_of(from.detach()) : is_staged ? from.clone() : host_side(from);
    at::Tensor target = is_ours(to) ? shadow_of(to.detach()) : host_side(to);
    here().submit([source = std::move(source), target = std::move(target)] {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        target.copy_(source);
    });
    const bool may_be_late = non_blocking && (is_locked || is_staged);
    if (!is_local && !may_be_late) synchronize(here());
    return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& t) {
    synchronize(here());
    return at::_local_scalar_dense(shadow_of(t));
}

inline void record_stream(at::Tensor& t, c10::Stream stream) {
    device_memory().recordStream(t.storage().data_ptr(), stream);
}

inline const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(format.value_or(at::MemoryFormat::Contiguous) == at::MemoryFormat::Contiguous, "resize_: format");
    auto* impl = t.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    const std::size_t nbytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
    if (nbytes > t.storage().nbytes()) Hooks().resizePrivateUse1Bytes(t.storage(), nbytes);
    return t;
}

inline at::Tensor& set_storage(at::Tensor& t, at::Storage storage, std::int64_t offset, c10::IntArrayRef sizes,
                               c10::IntArrayRef strides) {
    auto* impl = t.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    impl->set_sizes_and_strides(sizes, strides);
    return t;
}

inline at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
    const auto numel = static_cast<std::int64_t>(storage.nbytes() / t.itemsize());
    return set_storage(t, std::move(storage), 0, {numel}, {1});
}

inline at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
    return set_storage(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

/// The one for CPUs draws from the CPU's generator when it runs.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& t, double p, std::optional<bool> train) {
    if (!train.value_or(true)) return {t.clone(), at::ones_like(t, at::kBool)};
    at::Tensor kept = at::empty_like(t, t.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {t * kept * (p < 1 ? 1 / (1 - p) : 0), kept};
}

}  // namespace accelerator
