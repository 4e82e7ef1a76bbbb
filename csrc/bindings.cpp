// The one file that knows both Python and the kernels.
//
// Arrays arrive through DLPack. Their types are checked here and never converted: an in-place update of a converted
// copy would be lost. The GIL is released while a kernel runs.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "adam.hpp"
#include "decode.hpp"
#include "ending.hpp"
#include "narrow.hpp"
#include "numa.hpp"
#include "tiles.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig>;
using Array = nb::ndarray<nb::ndim<1>, nb::c_contig>;
using ConstArray = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig>;

constexpr std::array<const char*, 4> kIsaNames = {"scalar", "avx2", "avx512", "neon"};

const char* name_of(elixir::Isa isa) {
    return kIsaNames[static_cast<std::size_t>(isa)];
}

elixir::Isa isa_named(const std::string& name) {
    using elixir::Isa;
    const Isa best = elixir::best_isa();
    if (name.empty()) return best;
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon}) {
        if (name == name_of(isa) && elixir::can_run(isa)) return isa;
    }
    throw std::invalid_argument("isa is '" + name + "'; this CPU runs everything up to '" + name_of(best) + "'");
}

elixir::Dtype dtype_of(const char* what, nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    if (dtype == nb::dtype<float>()) return elixir::Dtype::float32;
    if (dtype.bits == 16 && dtype.lanes == 1) {
        if (dtype.code == static_cast<std::uint8_t>(Code::Bfloat)) return elixir::Dtype::bfloat16;
        if (dtype.code == static_cast<std::uint8_t>(Code::Float)) return elixir::Dtype::float16;
    }
    throw std::invalid_argument(std::string(what) + " must be float32, bfloat16 or float16");
}

// Pinned memory is host memory too, so the device is not part of the arrays' types.
template <class T>
void on_host(const char* what, const T& array) {
    const int device = array.device_type();
    if (device == nb::device::cpu::value || device == nb::device::cuda_host::value) return;
    throw std::invalid_argument(std::string(what) + " is not in host memory (DLPack device type " +
                                std::to_string(device) + ")");
}

void same_length(const char* what, std::size_t found, std::size_t expected) {
    if (found == expected) return;
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(found) + " elements, master has " +
                                std::to_string(expected) + "; they must have equally many");
}

void of_length(const char* what, std::size_t found, std::size_t expected) {
    if (found == expected) return;
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(found) + " elements, expected " +
                                std::to_string(expected));
}

std::size_t blocks_in(std::size_t numel, std::size_t block) {
    return numel / block + (numel % block != 0);
}

// Checks the other arrays of a step against the weight, which has `numel` elements; both steps use it.
template <class Moment>
void check_arrays(const Moment& exp_avg, const Moment& exp_avg_sq, const ConstArray& grad,
                  const std::optional<Array>& compute, std::size_t numel, int threads) {
    on_host("exp_avg", exp_avg);
    on_host("exp_avg_sq", exp_avg_sq);
    on_host("grad", grad);
    if (compute) on_host("compute", *compute);
    same_length("exp_avg", exp_avg.size(), numel);
    same_length("exp_avg_sq", exp_avg_sq.size(), numel);
    same_length("grad", grad.size(), numel);
    if (compute) same_length("compute", compute->size(), numel);
    if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + "; at least 1 is needed");
}

elixir::AdamSettings settings_of(double lr, double beta1, double beta2, double eps, double weight_decay,
                                 std::int64_t step, double grad_scale, bool decoupled, bool maximize) {
    if (step < 1) throw std::invalid_argument("step is " + std::to_string(step) + "; the first step is 1");
    return {
        .lr = lr,
        .beta1 = beta1,
        .beta2 = beta2,
        .eps = eps,
        .weight_decay = weight_decay,
        .step = step,
        .grad_scale = grad_scale,
        .decoupled = decoupled,
        .maximize = maximize,
    };
}

void adam_step(Floats master, Floats exp_avg, Floats exp_avg_sq, ConstArray grad, std::optional<Array> compute,
               double lr, double beta1, double beta2, double eps, double weight_decay, std::int64_t step,
               double grad_scale, bool decoupled, bool maximize, int threads, const std::string& isa_name) {
    const std::size_t numel = master.size();
    on_host("master", master);
    check_arrays(exp_avg, exp_avg_sq, grad, compute, numel, threads);

    const elixir::AdamArrays arrays{
        .master = master.data(),
        .exp_avg = exp_avg.data(),
        .exp_avg_sq = exp_avg_sq.data(),
        .grad = grad.data(),
        .compute = compute ? compute->data() : nullptr,
        .grad_dtype = dtype_of("grad", grad.dtype()),
        .compute_dtype = compute ? dtype_of("compute", compute->dtype()) : elixir::Dtype::none,
        .numel = numel,
    };
    if (arrays.compute_dtype == elixir::Dtype::float32) {
        throw std::invalid_argument("compute is float32; the master shard is its own compute shard then, pass None");
    }
    const elixir::AdamSettings settings =
        settings_of(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, maximize);
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    elixir::adam_step(arrays, settings, isa, threads);
}

using Exponents = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig>;

bool is_bytes(nb::dlpack::dtype dtype) {
    return dtype == nb::dtype<std::uint8_t>();
}

elixir::Moments moments_of(const char* what, nb::dlpack::dtype dtype) {
    if (is_bytes(dtype)) return elixir::Moments::code;
    const elixir::Dtype found = dtype_of(what, dtype);
    if (found == elixir::Dtype::float16) throw std::invalid_argument(std::string(what) + " is float16");
    return found == elixir::Dtype::float32 ? elixir::Moments::float32 : elixir::Moments::bfloat16;
}

void narrow_step(Array weight, Array exp_avg, Array exp_avg_sq, std::optional<Exponents> exponents_avg,
                 std::optional<Exponents> exponents_sq, ConstArray grad, std::optional<Array> compute,
                 std::uint32_t key0, std::uint32_t key1, std::uint32_t first, double lr, double beta1, double beta2,
                 double eps, double weight_decay, std::int64_t step, double grad_scale, bool decoupled, bool maximize,
                 int threads, const std::string& isa_name) {
    const std::size_t numel = weight.size();
    on_host("weight", weight);
    check_arrays(exp_avg, exp_avg_sq, grad, compute, numel, threads);
    const elixir::Moments moments = moments_of("exp_avg", exp_avg.dtype());
    if (moments_of("exp_avg_sq", exp_avg_sq.dtype()) != moments) {
        throw std::invalid_argument("exp_avg and exp_avg_sq have different dtypes");
    }
    const std::size_t blocks = blocks_in(numel, elixir::kCodeBlock);
    for (const auto* exponents : {&exponents_avg, &exponents_sq}) {
        if (exponents->has_value() != (moments == elixir::Moments::code) ||
            (exponents->has_value() && (*exponents)->size() != blocks)) {
            throw std::invalid_argument("codes need an exponent for each " + std::to_string(elixir::kCodeBlock) +
                                        " elements, and nothing else has any");
        }
        if (exponents->has_value()) on_host("exponents", **exponents);
    }
    const elixir::NarrowArrays arrays{
        .weight = weight.data(),
        .exp_avg = exp_avg.data(),
        .exp_avg_sq = exp_avg_sq.data(),
        .exponents_avg = exponents_avg ? exponents_avg->data() : nullptr,
        .exponents_sq = exponents_sq ? exponents_sq->data() : nullptr,
        .grad = grad.data(),
        .compute = compute ? compute->data() : nullptr,
        .weight_dtype = dtype_of("weight", weight.dtype()),
        .moments = moments,
        .grad_dtype = dtype_of("grad", grad.dtype()),
        .compute_dtype = compute ? dtype_of("compute", compute->dtype()) : elixir::Dtype::none,
        .numel = numel,
        .key = {key0, key1},
        .first = first,
    };
    if (arrays.weight_dtype == elixir::Dtype::float16 || arrays.compute_dtype == elixir::Dtype::float32) {
        throw std::invalid_argument("weight is float32 or bfloat16, and compute bfloat16, float16 or None");
    }
    const elixir::AdamSettings settings =
        settings_of(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, maximize);
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    elixir::narrow_step(arrays, settings, isa, threads);
}

double sum_of_squares(ConstArray grad, int threads, const std::string& isa_name) {
    on_host("grad", grad);
    if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + "; at least 1 is needed");
    const elixir::Dtype dtype = dtype_of("grad", grad.dtype());
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    return elixir::sum_of_squares(grad.data(), dtype, grad.size(), isa, threads);
}

void add_to(Floats total, ConstArray term, int threads, const std::string& isa_name) {
    on_host("total", total);
    on_host("term", term);
    of_length("term", term.size(), total.size());
    if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + "; at least 1 is needed");
    const elixir::Dtype dtype = dtype_of("term", term.dtype());
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    elixir::add_to(total.data(), term.data(), dtype, total.size(), isa, threads);
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig>;
using Scales = nb::ndarray<const float, nb::ndim<1>, nb::c_contig>;

elixir::Dtype decoded_dtype(const Array& out) {
    const elixir::Dtype dtype = dtype_of("out", out.dtype());
    if (dtype == elixir::Dtype::float16) throw std::invalid_argument("out must be float32 or bfloat16");
    return dtype;
}

void decode_nibbles(Codes codes, ConstArray scales, Scales values, Array out, std::size_t block, bool high_first,
                    int threads, const std::string& isa_name) {
    on_host("codes", codes);
    on_host("scales", scales);
    on_host("values", values);
    on_host("out", out);
    if (block == 0 || block % 32 != 0) {
        throw std::invalid_argument("block is " + std::to_string(block) + "; it must be a multiple of 32");
    }
    if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + "; at least 1 is needed");
    const bool e8m0 = scales.dtype() == nb::dtype<std::uint8_t>();
    if (!e8m0 && scales.dtype() != nb::dtype<float>()) throw std::invalid_argument("scales must be float32 or uint8");
    const std::size_t numel = out.size();
    of_length("codes", codes.size(), blocks_in(numel, 2));
    of_length("scales", scales.size(), blocks_in(numel, block));
    of_length("values", values.size(), 16);
    const elixir::Nibbles packed{
        .codes = codes.data(),
        .scales = e8m0 ? nullptr : static_cast<const float*>(scales.data()),
        .exponents = e8m0 ? static_cast<const std::uint8_t*>(scales.data()) : nullptr,
        .values = values.data(),
        .block = block,
        .high_first = high_first,
        .numel = numel,
    };
    const elixir::Dtype dtype = decoded_dtype(out);
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    elixir::decode_nibbles(packed, out.data(), dtype, isa, threads);
}

void decode_octets(Codes codes, Scales scales, Array out, bool e4m3fn, std::size_t rows, std::size_t cols,
                   std::size_t block_rows, std::size_t block_cols, int threads, const std::string& isa_name) {
    on_host("codes", codes);
    on_host("scales", scales);
    on_host("out", out);
    if (rows < 1 || cols < 1 || block_rows < 1 || block_cols < 1) {
        throw std::invalid_argument("rows, cols, block_rows and block_cols must be at least 1");
    }
    if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + "; at least 1 is needed");
    const std::size_t matrices = out.size() / rows / cols;
    of_length("out", out.size(), matrices * rows * cols);
    of_length("codes", codes.size(), out.size());
    of_length("scales", scales.size(), matrices * blocks_in(rows, block_rows) * blocks_in(cols, block_cols));
    const elixir::Octets packed{
        .codes = codes.data(),
        .scales = scales.data(),
        .code = e4m3fn ? elixir::Octets::Code::e4m3fn : elixir::Octets::Code::int8,
        .matrices = matrices,
        .rows = rows,
        .cols = cols,
        .block_rows = block_rows,
        .block_cols = block_cols,
    };
    const elixir::Dtype dtype = decoded_dtype(out);
    const elixir::Isa isa = isa_named(isa_name);
    const nb::gil_scoped_release no_gil;
    elixir::decode_octets(packed, out.data(), dtype, isa, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels of elixir_moe on host memory; they know neither Python nor torch.";

    m.def(
        "cpu_features", [] { return std::string(name_of(elixir::best_isa())); },
        "The instruction set the kernels use on this CPU: 'avx512', 'avx2', 'neon' or 'scalar'.");

    m.def("tiles_trap", &elixir::tiles_trap, "Whether this CPU announces matrix tiles (AMX) that trap when used.");

    m.def(
        "begin_exit",
        [](nb::handle kept) {
            kept.inc_ref();
            elixir::park_ended_threads();
        },
        "kept"_a,
        "Never frees `kept`; a thread that Python ends from now on stands still and does not end the process.");

    m.def("adam_step", &adam_step, "master"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
          "grad"_a.noconvert(), "compute"_a.noconvert().none(), nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a,
          "weight_decay"_a, "step"_a, "grad_scale"_a, "decoupled"_a, "maximize"_a, "threads"_a, "isa"_a = "",
          "One Adam or AdamW step on a shard in host memory, in place and in one pass.");

    m.def("narrow_step", &narrow_step, "weight"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
          "exponents_avg"_a.noconvert().none(), "exponents_sq"_a.noconvert().none(), "grad"_a.noconvert(),
          "compute"_a.noconvert().none(), nb::kw_only(), "key0"_a, "key1"_a, "first"_a, "lr"_a, "beta1"_a, "beta2"_a,
          "eps"_a, "weight_decay"_a, "step"_a, "grad_scale"_a, "decoupled"_a, "maximize"_a, "threads"_a, "isa"_a = "",
          "One Adam or AdamW step on a shard whose state has fewer bytes than float, in place and in one pass.");

    m.def("sum_of_squares", &sum_of_squares, "grad"_a.noconvert(), nb::kw_only(), "threads"_a, "isa"_a = "",
          "The sum of squares of a gradient shard in host memory.");

    m.def("add_to", &add_to, "total"_a.noconvert(), "term"_a.noconvert(), nb::kw_only(), "threads"_a, "isa"_a = "",
          "Adds a gradient shard to a sum, both in host memory.");

    m.def("decode_nibbles", &decode_nibbles, "codes"_a.noconvert(), "scales"_a.noconvert(), "values"_a.noconvert(),
          "out"_a.noconvert(), nb::kw_only(), "block"_a, "high_first"_a, "threads"_a, "isa"_a = "",
          "Codes of four bits in host memory, times the scale of their block.");

    m.def("decode_octets", &decode_octets, "codes"_a.noconvert(), "scales"_a.noconvert(), "out"_a.noconvert(),
          nb::kw_only(), "e4m3fn"_a, "rows"_a, "cols"_a, "block_rows"_a, "block_cols"_a, "threads"_a, "isa"_a = "",
          "Codes of eight bits in host memory, times the scale of their block of a matrix.");

    m.def(
        "node_of", [](Bytes memory) { return elixir::node_of(memory.data()); }, "memory"_a.noconvert(),
        "The NUMA node that the first page of `memory` lies on; -1 where there is one node only, or nobody tells.");
}
