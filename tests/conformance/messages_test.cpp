// send and recv.

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "conformance/conformance.hpp"

namespace lockstep::test {
namespace {

TEST_P(Conformance, send_and_recv_around_a_ring) {
  run([] {
    const Group group = default_group();
    if (group.size() == 1) {
      int nothing = 0;
      EXPECT_THROW(group.send({&nothing, 1, DType::i32}, 0), UsageError);
      EXPECT_THROW(group.recv({&nothing, 1, DType::i32}, 0), UsageError);
      return;
    }
    const int next = (group.rank() + 1) % group.size();
    const int previous = (group.rank() + group.size() - 1) % group.size();
    for (const std::size_t count : kCounts) {
      const Bytes sent = values(DType::f32, count, /*seed=*/11, group.rank());
      Bytes received(sent.size());
      const auto send = [&] { group.send({sent.data(), count, DType::f32}, next); };
      const auto recv = [&] { group.recv({received.data(), count, DType::f32}, previous); };
      // Long messages wait for their receiver: one rank must begin by receiving.
      if (group.rank() == 0) {
        send();
        recv();
      } else {
        recv();
        send();
      }
      ASSERT_EQ(received, values(DType::f32, count, /*seed=*/11, previous));
    }
  });
}

TEST_P(Conformance, messages_of_one_sender_to_many) {
  run([] {
    const Group group = default_group();
    for (int turn = 0; turn < 50; ++turn) {
      if (group.rank() == 0) {
        for (int r = 1; r < group.size(); ++r) send(std::vector<int>{turn, r}, r);
      } else {
        std::vector<int> got(2);
        recv(got, 0);
        ASSERT_EQ(got, (std::vector<int>{turn, group.rank()}));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
