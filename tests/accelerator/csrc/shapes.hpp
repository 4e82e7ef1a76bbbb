// What operators make of shapes: the results of a call on the meta device, kept for the next call alike.
//
// Torch computes many of these in Python, which takes some hundred times as long as to find them again.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DefaultDtype.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace accelerator {

using Values = torch::jit::Stack;

/// The results of an operator and its arguments afterwards, as meta tensors that nobody changes.
struct Shapes {
    Values results;
    Values arguments;
};

/// What the shapes of a call's results follow from, as bytes.
class ShapeKey {
  public:
    ShapeKey(const c10::OperatorHandle& op, const Values& arguments) {
        put(op.operator_name().name);
        put(op.operator_name().overload_name);
        put(c10::get_default_dtype_as_scalartype());
        for (const c10::IValue& argument : arguments) put(argument);
    }
    /// Nothing if an argument is of a kind that cannot be written down.
    const std::optional<std::string>& bytes() const { return bytes_; }

  private:
    template <class T>
        requires std::is_trivially_copyable_v<T>
    void put(const T& plain) {
        if (bytes_) bytes_->append(reinterpret_cast<const char*>(&plain), sizeof plain);
    }
    void put(const std::string& text) {
        put(text.size());
        if (bytes_) bytes_->append(text);
    }
    void put(c10::IntArrayRef numbers) {
        put(numbers.size());
        for (const std::int64_t number : numbers) put(number);
    }
    void put(const at::Tensor& t) {
        put(t.defined());
        if (!t.defined()) return;
        put(t.scalar_type());
        put(t.unsafeGetTensorImpl()->is_wrapped_number());
        put(t.sizes());
        put(t.strides());
    }
    void put(const c10::IValue& value) {
        put(value.tagKind());
        if (value.isTensor()) {
            put(value.toTensor());
        } else if (value.isInt()) {
            put(value.toInt());
        } else if (value.isDouble()) {
            put(value.toDouble());
        } else if (value.isBool()) {
            put(value.toBool());
        } else if (value.isString()) {
            put(value.toStringRef());
        } else if (value.isDevice()) {
            put(value.toDevice());
        } else if (value.isList()) {
            put(value.toListRef().size());
            for (const c10::IValue& item : value.toListRef()) put(item);
        } else if (!value.isNone()) {
            bytes_.reset();
        }
    }

    std::optional<std::string> bytes_ = std::string();
};

class ShapeCache {
  public:
    using Found = std::shared_ptr<const Shapes>;

    /// The shapes of a call on meta tensors; null if no kernel for them exists.
    Found of(const c10::OperatorHandle& op, Values arguments) {
        const ShapeKey key(op, arguments);
        if (key.bytes()) {
            std::lock_guard lock(mutex_);
            if (const auto found = known_.find(*key.bytes()); found != known_.end()) return found->second;
        }
        Found computed = compute(op, std::move(arguments));
        if (key.bytes()) {
            std::lock_guard lock(mutex_);
            known_[*key.bytes()] = computed;
        }
        return computed;
    }

  private:
    static Found compute(const c10::OperatorHandle& op, Values arguments) {
        Values results = arguments;
        try {
            op.callBoxed(&results);
        } catch (const c10::NotImplementedError&) {
            return nullptr;
        }
        correct_dtypes(op, arguments, results);
        return std::make_shared<const Shapes>(Shapes{std::move(results), std::move(arguments)});
    }

    /// The layer norm for CPUs returns its statistics in the dtype of the weight, that of meta tensors in fp32.
    static void correct_dtypes(const c10::OperatorHandle& op, const Values& arguments, Values& results) {
        if (op.schema().name() != "aten::native_layer_norm") return;
        const bool has_weight = arguments[2].isTensor() && arguments[2].toTensor().defined();
        const auto dtype = arguments[has_weight ? 2 : 0].toTensor().scalar_type();
        for (const std::size_t i : {1, 2}) results[i] = results[i].toTensor().to(dtype);
    }

    std::mutex mutex_;
    std::unordered_map<std::string, Found> known_;
};

inline ShapeCache& shape_cache() {
    static auto* one = new ShapeCache;
    return *one;
}

}  // namespace accelerator
