#include "exec/host/host_network.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace mkernel {
namespace {

PlanSpec two_nodes() {
  PlanSpec spec;
  spec.op = Op::kAllGatherGemm;
  spec.topo = {2, 1};
  spec.m = 64;
  spec.n = 8;
  spec.k = 8;
  spec.tiling = {.bm = 16, .bn = 16, .band = 1, .chunk_tiles = 1, .chunk_rows = 16, .copy_rows = 16, .pitch_align = 1};
  return spec;
}

// Two ranks without SMs, whose records the test pushes itself.
class HostNetworkTest : public ::testing::Test {
 protected:
  HostNetworkTest() : source_(std::make_shared<PlanSource>(Plan(two_nodes()))) {
    shared_.topo = {2, 1};
    shared_.deadline_ns = 10'000'000'000;
    for (std::int32_t rank = 0; rank < 2; ++rank) shared_.streams.push_back(std::make_unique<Stream>(rank, 1));
    network_ = std::make_unique<HostNetwork>(shared_, LinkModel{}, nullptr, 1, 2);
    shared_.network = network_.get();
    HostOperatorConfig config;
    config.source = source_;
    config.partition = {1, 0, 0};
    op_ = std::make_unique<HostOperator>(0, config);
    network_->add_operator(*op_, source_);
  }
  ~HostNetworkTest() override {
    shared_.stop.store(true);
    network_->join();
  }

  // Chunk `index` of rank 0 to rank 1, in the first epoch.
  bool push(std::int64_t index) {
    Record record;
    record.epoch = 1;
    record.task = static_cast<std::uint32_t>(send_id(source_->plan(), {0, index}));
    return network_->push(0, 1, record);
  }
  std::int64_t stamp_of(std::int64_t index) const {
    return op_->layout().flag_index(source_->plan().task(0, Role::kSend, 0, index).signals[0].flag, 1);
  }
  bool wait_for_stamp(std::int64_t index) const {
    const Nanos end = steady_now() + 10'000'000'000;
    while (op_->flag(1, stamp_of(index)).load(std::memory_order_acquire) == 0) {
      if (steady_now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

  HostShared shared_;
  std::shared_ptr<const PlanSource> source_;
  std::unique_ptr<HostNetwork> network_;
  std::unique_ptr<HostOperator> op_;
};

TEST_F(HostNetworkTest, ARankThatFoundItsRingFullIsWokenWhenThereIsRoom) {
  EXPECT_TRUE(push(0));
  EXPECT_FALSE(push(1));
  Doorbell& bell = shared_.streams[0]->bell;
  const std::uint32_t seen = bell.sequence();
  network_->start();
  bell.sleep(seen, steady_now() + 10'000'000'000);
  EXPECT_NE(bell.sequence(), seen) << "nothing else rings the sender's bell";
  EXPECT_TRUE(push(1));
  EXPECT_TRUE(wait_for_stamp(0));
  EXPECT_TRUE(wait_for_stamp(1));
}

TEST_F(HostNetworkTest, AStampComesAfterItsBytesAndWakesItsRank) {
  const Task task = source_->plan().task(0, Role::kSend, 0, 0);
  const std::int64_t from = op_->layout().offset(task.src, task.src_offset, 1);
  const std::int64_t to = op_->layout().offset(task.dst, task.dst_offset, 1);
  const auto bytes = static_cast<std::size_t>(task.length * 2);
  for (std::size_t i = 0; i < bytes; ++i) op_->memory().heap(0)[from + static_cast<std::int64_t>(i)] = std::byte{7};
  const std::uint32_t seen = shared_.streams[1]->bell.sequence();
  network_->start();
  EXPECT_TRUE(push(0));
  ASSERT_TRUE(wait_for_stamp(0));
  for (std::size_t i = 0; i < bytes; ++i) {
    ASSERT_EQ(op_->memory().heap(1)[to + static_cast<std::int64_t>(i)], std::byte{7}) << i;
  }
  EXPECT_EQ(op_->network_bytes.load(), static_cast<std::int64_t>(bytes));
  // Rung after the stamp, so perhaps not yet.
  shared_.streams[1]->bell.sleep(seen, steady_now() + 10'000'000'000);
  EXPECT_NE(shared_.streams[1]->bell.sequence(), seen);
}

}  // namespace
}  // namespace mkernel
