// Two backends of torch.distributed for the fake accelerator, both over gloo.
//
// "gloo" is what ProcessGroupGloo is for CUDA: collectives take the device's tensors, messages do not.
// "ranked" is what NCCL is: messages between two ranks go one after the other, in the order in which they are begun,
// whatever their tag and direction, and a message is over when both ends have come to it. Who waits for one that it
// sends is not held up; those that are begun together (batch_isend_irecv) may go in any order among themselves.
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace {

using c10d::Backend;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using Start = std::function<WorkPtr()>;

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& t : tensors) found.push_back(::on_host(t));
  return found;
}
std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const auto& tensors : lists) found.push_back(on_host(tensors));
  return found;
}

// Of messages that go together; the waiting of a sender ends at once.
struct Message final : Work {
  explicit Message(bool arrives) : arrives(arrives) {}
  bool wait(std::chrono::milliseconds timeout) override { return arrives ? Work::wait(timeout) : true; }
  using Work::finish;
  const bool arrives;
};

struct Lane {  // does its jobs in order
  using Job = std::pair<std::vector<Start>, c10::intrusive_ptr<Message>>;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;

  static std::shared_ptr<Lane> open() {
    auto lane = std::make_shared<Lane>();
    std::thread([lane] { lane->run(); }).detach();
    return lane;
  }
  void add(Job job) {
    { std::lock_guard<std::mutex> hold(mutex); jobs.push_back(std::move(job)); }
    changed.notify_one();
  }
  void run() {
    while (true) {
      std::unique_lock<std::mutex> hold(mutex);
      changed.wait(hold, [this] { return !jobs.empty(); });
      auto [starts, message] = std::move(jobs.front());
      jobs.pop_front();
      hold.unlock();
      if (starts.empty()) return;
      try {
        std::vector<WorkPtr> works;
        for (auto& start : starts) works.push_back(start());
        for (auto& work : works) work->wait();
        message->finish();
      } catch (...) {
        message->finish(std::current_exception());
      }
    }
  }
};

struct OverGloo final : Backend {
  OverGloo(c10::intrusive_ptr<Backend> gloo, bool ranked) : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), ranked(ranked) {}
  ~OverGloo() override { for (auto& [_, lane] : lanes) lane->add({}); }

  const std::string getBackendName() const override { return ranked ? "ranked" : "gloo"; }
  bool supportsCoalescing() const override { return ranked; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { auto h = on_host(t); return gloo->broadcast(h, o); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { auto h = on_host(t); return gloo->allreduce(h, o); }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override { auto h = on_host(t); return gloo->reduce(h, o); }
  WorkPtr allgather(std::vector<Tensors>& to, Tensors& t, const c10d::AllgatherOptions& o) override { auto a = on_host(to); auto h = on_host(t); return gloo->allgather(a, h, o); }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& t, const c10d::AllgatherOptions& o) override { auto a = ::on_host(to), h = ::on_host(t); return gloo->_allgather_base(a, h, o); }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& t, const c10d::GatherOptions& o) override { auto a = on_host(to); auto h = on_host(t); return gloo->gather(a, h, o); }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& t, const c10d::ScatterOptions& o) override { auto a = on_host(to); auto h = on_host(t); return gloo->scatter(a, h, o); }
  WorkPtr _reduce_scatter_base(at::Tensor& to, at::Tensor& t, const c10d::ReduceScatterOptions& o) override { auto a = ::on_host(to), h = ::on_host(t); return gloo->_reduce_scatter_base(a, h, o); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo->barrier(o); }

  WorkPtr send(Tensors& t, int to, int tag) override {
    if (!ranked) refuse(t);
    Tensors sent;  // as it is now: what is computed later comes later on the device, too
    for (const auto& one : t) sent.push_back(::on_host(one).clone());
    return go(to, false, [gloo = gloo, sent, to](int tag) mutable { return gloo->send(sent, to, tag); });
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    if (!ranked) refuse(t);
    return go(from, true, [gloo = gloo, into = on_host(t), from](int tag) mutable { return gloo->recv(into, from, tag); });
  }
  void startCoalescing() override { together = true; }
  WorkPtr endCoalescing() override {
    together = false;
    auto message = c10::make_intrusive<Message>(true);
    lane(getRank())->add({std::exchange(begun, {}), message});
    return message;
  }

 private:
  void refuse(const Tensors& t) { TORCH_CHECK(false, "gloo reads memory of the host, and this message is on ", t[0].device()); }
  std::shared_ptr<Lane> lane(int peer) {
    if (!lanes.count(peer)) lanes[peer] = Lane::open();
    return lanes[peer];
  }
  WorkPtr go(int peer, bool arrives, std::function<WorkPtr(int)> start) {
    if (together) {
      begun.push_back([start] { return start(2); });
      return nullptr;
    }
    auto message = c10::make_intrusive<Message>(arrives);
    lane(peer)->add({{[start] { return start(1); }}, message});
    return message;
  }

  c10::intrusive_ptr<Backend> gloo;
  const bool ranked;
  bool together = false;
  std::vector<Start> begun;
  std::map<int, std::shared_ptr<Lane>> lanes;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("over_gloo", [](c10::intrusive_ptr<Backend> gloo, bool ranked) -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<OverGloo>(std::move(gloo), ranked); });
}
