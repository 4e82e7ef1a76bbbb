// Collectives by NCCL's rules, computed by gloo on the shadows of tensors.
//
// An operation is a task of a stream: of the current one, or of the group's own if it is asynchronous; then `wait`
// orders the caller's stream, and not the host, after it. Operations of a group run in the order of their issue.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "operators.hpp"

namespace accelerator {

using Tensors = std::vector<at::Tensor>;

inline Tensors shadows_of(const Tensors& tensors) {
    Tensors found;
    for (const at::Tensor& t : tensors) found.push_back(shadow_of(t));
    return found;
}

/// An operation in flight; keeps its tensors until somebody has waited.
class InFlight final : public c10d::Work {
  public:
    InFlight(int rank, c10d::OpType type, Mark mark, Tensors tensors)
        : Work(rank, type), mark_(mark), type_(type), tensors_(std::move(tensors)) {}

    bool isCompleted() override { return mark_.reached(); }
    bool isSuccess() const override { return true; }
    void synchronize() override {
        order_after(here(), mark_);
        if (type_ == c10d::OpType::BARRIER) accelerator::synchronize(here());
        tensors_.clear();
    }
    bool wait(std::chrono::milliseconds /*timeout*/) override {
        synchronize();
        return true;
    }
    Tensors result() override { return tensors_; }

  private:
    Mark mark_;
    c10d::OpType type_;
    Tensors tensors_;
};

class Group final : public c10d::Backend {
  public:
    using Backend = c10d::Backend;
    using Issued = c10::intrusive_ptr<c10d::Work>;

    explicit Group(c10::intrusive_ptr<Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(streams().add()) {}

    const std::string getBackendName() const override { return "threads"; }
    void setSequenceNumberForGroup() override {}
    std::uint64_t getSequenceNumberForGroup() override { return issued_; }
    void abort() override { gloo_->abort(); }
    void shutdown() override { gloo_->shutdown(); }

    Issued broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return issue(
            c10d::OpType::BROADCAST, options.asyncOp, tensors,
            [on = shadows_of(tensors), options](Backend& gloo) mutable { return gloo.broadcast(on, options); });
    }
    Issued allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return issue(
            c10d::OpType::ALLREDUCE, options.asyncOp, tensors,
            [on = shadows_of(tensors), options](Backend& gloo) mutable { return gloo.allreduce(on, options); });
    }
    Issued reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        return issue(c10d::OpType::REDUCE, options.asyncOp, tensors,
                     [on = shadows_of(tensors), options](Backend& gloo) mutable { return gloo.reduce(on, options); });
    }
    Issued allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
        std::vector<Tensors> into = {shadows_of(to.at(0))};
        return issue(c10d::OpType::ALLGATHER, options.asyncOp, joined(to.at(0), from),
                     [into, of = shadows_of(from), options](Backend& gloo) mutable {
                         return gloo.allgather(into, of, options);
                     });
    }
    Issued _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
        return issue(c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {to, from},
                     [into = shadow_of(to), of = shadow_of(from), options](Backend& gloo) mutable {
                         return gloo._allgather_base(into, of, options);
                     });
    }
    Issued _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
        return issue(c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {to, from},
                     [into = shadow_of(to), of = shadow_of(from), options](Backend& gloo) mutable {
                         return gloo._reduce_scatter_base(into, of, options);
                     });
    }
    Issued alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_sizes,
                         std::vector<std::int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
        return issue(
            c10d::OpType::ALLTOALL_BASE, options.asyncOp, {to, from},
            [into = shadow_of(to), of = shadow_of(from), to_sizes, from_sizes, options](Backend& gloo) mutable {
                return gloo.alltoall_base(into, of, to_sizes, from_sizes, options);
            });
    }
    Issued barrier(const c10d::BarrierOptions& options) override {
        return issue(c10d::OpType::BARRIER, true, {}, [](Backend& gloo) { return gloo.barrier(); });
    }

  private:
    static Tensors joined(Tensors a, const Tensors& b) {
        a.insert(a.end(), b.begin(), b.end());
        return a;
    }

    Issued issue(c10d::OpType type, bool asynchronous, Tensors tensors, std::function<Issued(Backend&)> start) {
        Stream& stream = asynchronous ? stream_ : here();
        order_after(stream, end_of(here()));
        order_after(stream, last_);
        last_ = {&stream, stream.submit([gloo = gloo_, start = std::move(start)] { start(*gloo)->wait(); })};
        ++issued_;
        if (!asynchronous) tensors.clear();  // their memory is reused only behind this task
        return c10::make_intrusive<InFlight>(getRank(), type, last_, std::move(tensors));
    }

    c10::intrusive_ptr<Backend> gloo_;
    Stream& stream_;
    Mark last_;
    std::uint64_t issued_ = 0;
};

}  // namespace accelerator
