// The queue pairs from one rank to its peers: all in which reliable connections (RC) and EFA's SRD differ.
#pragma once
#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mkernel/result.h"
#include "net/verbs/device.h"

namespace mkernel {

// One remote write, as it is handed to a queue pair.
struct WriteRequest {
  std::uint64_t id = 0;  // comes back with its completion
  const void* source = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t source_key = 0;
  std::uint64_t destination = 0;
  std::uint32_t destination_key = 0;
  std::uint32_t immediate = 0;
  bool has_immediate = false;
  bool copied = false;    // the source is read during the call, and needs no key
  bool signaled = false;  // it gets a completion, which stands for all before it on its queue pair
};

struct QueuePairsConfig {
  const VerbsDevice* device = nullptr;
  ibv_cq* send_completions = nullptr;
  ibv_cq* receive_completions = nullptr;
  std::int32_t rank = 0;
  std::vector<std::int32_t> peers;  // ranks; "slot" is an index here
  int lanes = 1;                    // queue pairs per peer
  int send_depth = 256;             // writes in flight per lane
  int receive_depth = 4096;         // immediates that may come before anybody looks
  int timeout = 17;                 // 4.096 us * 2^timeout per retry (InfiniBand 9.7.6.1.3)
  int retry_count = 6;              // 7 is no number to rdma_rxe, but for ever
  int traffic_class = 0;
  int service_level = 0;
  std::uint32_t mode = 0;  // what the two sides must agree on
};

class QueuePairs {
 public:
  virtual ~QueuePairs() = default;

  // What a peer must know to connect; the same for all peers.
  virtual std::string address() const = 0;
  // `rank` is only for errors. Errors: kIo, and kBadArgument when the peer is set up in another way.
  virtual Status connect(int slot, std::int32_t rank, std::string_view address) = 0;

  // Hands requests over, in order, with one doorbell. 0, or the errno of request `accepted`, before which all are
  // taken.
  virtual int post(int slot, int lane, std::span<const WriteRequest> requests, std::size_t& accepted) = 0;
  // Makes room for `count` more immediates; how many it did.
  virtual int post_receives(int count) = 0;
  // Whose immediate it was; -1: not known.
  virtual std::int32_t peer_of(const ibv_wc& completion) const = 0;

  virtual std::int64_t max_message() const = 0;  // bytes of one write
  virtual std::int64_t max_copied() const = 0;   // bytes of one whose source is read during the call
  virtual int send_depth() const = 0;            // of a lane
  virtual int max_in_flight() const = 0;         // of all lanes together
  virtual bool ordered() const = 0;              // writes of a lane arrive and complete in their order
};

// Reliable connections, `lanes` per peer, which share one receive queue.
Result<std::unique_ptr<QueuePairs>> create_rc_queue_pairs(const QueuePairsConfig& config);

// Why a device is no EFA that can be used, or an empty text.
std::string efa_device_obstacle(const VerbsDevice& device);

// One SRD queue pair of AWS EFA for all peers. Errors: kUnsupported in a build without EFA's header, and where the
// device cannot do remote writes.
Result<std::unique_ptr<QueuePairs>> create_efa_queue_pairs(const QueuePairsConfig& config);

}  // namespace mkernel
