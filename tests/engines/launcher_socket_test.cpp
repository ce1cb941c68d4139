#include "engines/shared/bootstrap/launcher_socket.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <lockstep/error.hpp>
#include <thread>

#include "support/waiting.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

NextWorld ask(const LauncherSocket& sockets, milliseconds timeout) {
  const Call barrier{.op = Op::barrier,
                     .group = "world",
                     .operation = "init_dist",
                     .timeout = timeout,
                     .where = std::source_location::current()};
  return request_next_world(sockets.rank.get(), /*rank=*/0, /*last_generation=*/-1,
                            /*is_elastic=*/false, barrier);
}

TEST(LauncherSocketTest, an_answer_after_the_limit_is_not_that_of_the_next_request) {
  const LauncherSocket sockets = make_launcher_socket();
  const base::UniqueFd segment(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THROW(ask(sockets, milliseconds(1)), TimeoutError);
  const LauncherRequest late = receive_request(sockets.launcher.get());
  ASSERT_EQ(late.kind, LauncherRequest::Kind::next_world);
  answer(sockets.launcher.get(), late.number, segment.get(), {.size = 2});
  NextWorld next;
  std::thread rank([&] { next = ask(sockets, milliseconds(30'000)); });
  LauncherRequest request{};
  EXPECT_TRUE(test::wait_until([&] {
    request = receive_request(sockets.launcher.get());
    return request.kind == LauncherRequest::Kind::next_world;
  }));
  answer(sockets.launcher.get(), request.number, segment.get(), {.size = 3});
  rank.join();
  EXPECT_EQ(next.size, 3);
}

TEST(LauncherSocketTest, of_several_requests_the_newest_is_answered) {
  const LauncherSocket sockets = make_launcher_socket();
  EXPECT_THROW(ask(sockets, milliseconds(1)), TimeoutError);
  EXPECT_THROW(ask(sockets, milliseconds(2)), TimeoutError);
  const LauncherRequest newest = receive_request(sockets.launcher.get());
  EXPECT_EQ(newest.kind, LauncherRequest::Kind::next_world);
  EXPECT_EQ(newest.limit, milliseconds(2));
  EXPECT_EQ(receive_request(sockets.launcher.get()).kind, LauncherRequest::Kind::none);
}

}  // namespace
}  // namespace lockstep::shared
