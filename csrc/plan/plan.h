// What one rank does in one call: which op runs on which stream, in which order, and what it waits for.
//
// A plan is data. Builders write it (builders.h), the checker proves it (check.h), the executors carry it out
// (csrc/host, csrc/cuda) and never decide an order themselves. Nothing here knows of bytes, shapes, torch or CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace streamoverlap::plan {

enum class Operation : std::uint8_t {
  AllGatherGemm,
  GemmReduceScatter,
  AllGather,
  ReduceScatter,
  AllReduce,
  GemmAllReduce
};
inline constexpr int kOperations = 6;
enum class Algorithm : std::uint8_t { Ring, Direct };

// How partial products are summed: folded into the next GEMM (D = A W^T + C), or by a Reduce in fp32.
enum class Reduction : std::uint8_t { Accumulate, Sum };

// How a partial product gets to a peer's slot: into scratch memory and from there by a Put, or by the Gemm itself.
enum class Transfer : std::uint8_t { Copy, Store };

// Which chunks of a shard have half the rows of the others: what is sent first, or comes last, hides behind nothing.
enum class Taper : std::uint8_t { None, First, Last, Both };

// A variant of an operation; together with the shapes it is what all ranks must agree on.
struct Spec {
  Operation operation = Operation::AllGatherGemm;
  Algorithm algorithm = Algorithm::Direct;
  Reduction reduction = Reduction::Accumulate;
  int world = 1;
  int chunks = 1;              // parts of a shard
  int compute_streams = 1;     // GEMMs go round robin over these
  bool keep_gathered = false;  // all_gather_gemm: also hand out the gathered input
  bool copy_input = false;     // plain collectives: copy the input first, so that the caller may write it at once
  bool scaled = false;         // products: rows of the input have scales, which go where the rows go
  Transfer transfer = Transfer::Copy;
  Taper taper = Taper::None;  // no matter of plans, which know of no rows; but all ranks must have the same
  bool quantised = false;     // sums: partials travel in fewer bits, each row with its scale

  auto tie() const {
    return std::tie(operation, algorithm, reduction, world, chunks, compute_streams, keep_gathered, copy_input, scaled,
                    transfer, taper, quantised);
  }
};

inline constexpr int kMaxWorld = 64;
inline constexpr int kMaxChunks = 64;
inline constexpr int kMaxComputeStreams = 3;

// Stream roles of a rank. `main` is the caller's stream; compute stream i is kCompute + i.
using Stream = int;
inline constexpr Stream kMain = 0;
inline constexpr Stream kSend = 1;
inline constexpr Stream kRecv = 2;
inline constexpr Stream kCompute = 3;
inline constexpr int kMaxStreams = kCompute + kMaxComputeStreams;

enum class Buffer : std::uint8_t {
  Input,       // the caller's x
  Output,      // the caller's y
  Gathered,    // the caller's copy of the gathered input, where asked for
  Slot,        // the symmetric buffer that peers write to
  Scratch,     // partials of this rank on their way to a peer; nobody else sees them
  Copied,      // this call's own copy of the input, where asked for and the output cannot take it
  Scales,      // the caller's: of the rows of the input
  SlotScales,  // of the rows in the slot; a part of that memory
  Packed,      // quantised partials on their way to a peer; a part of scratch memory
};
inline constexpr int kBuffers = 9;

// Where the scales of what lies in Input or Slot are.
inline Buffer scales_of(Buffer rows) { return rows == Buffer::Slot ? Buffer::SlotScales : Buffer::Scales; }
inline bool is_scales(Buffer buffer) { return buffer == Buffer::Scales || buffer == Buffer::SlotScales; }
// Memory that peers write to, and that calls on one slot share.
inline bool in_slot(Buffer buffer) { return buffer == Buffer::Slot || buffer == Buffer::SlotScales; }
// Memory of this rank alone, that calls on one slot share.
inline bool in_scratch(Buffer buffer) { return buffer == Buffer::Scratch || buffer == Buffer::Packed; }

// One chunk of one shard in a buffer of a rank. In the slot of a direct reduce-scatter `shard` is the sender; that of a
// direct or quantised all-reduce goes on with the sums: shard s of them is world + s.
struct Region {
  Buffer buffer = Buffer::Input;
  int rank = 0;
  int shard = 0;
  int chunk = 0;

  auto tie() const { return std::tie(rank, buffer, shard, chunk); }
};

enum class FlagKind : std::uint8_t {
  Full,   // data has arrived: set by the sender, lives at the receiver
  Empty,  // the credit: the receiver's slot may be written, set by the receiver, lives at the sender
};

// A 32-bit word in shared memory. Between calls every Full flag is clear and every Empty flag is set.
struct Flag {
  FlagKind kind = FlagKind::Full;
  int sender = -1;
  int receiver = -1;
  int index = 0;  // Full: below full_flags_per_pair(world); Empty: 0

  int owner() const { return kind == FlagKind::Full ? receiver : sender; }  // awaits and clears it
  int setter() const { return kind == FlagKind::Full ? sender : receiver; }
  auto tie() const { return std::tie(kind, sender, receiver, index); }
};

enum class Kind : std::uint8_t {
  Gemm,      // compute: writes[0], here or in a peer's slot, = reads[0] W^T (+ c) (+ bias); see scales() and c()
  Put,       // send: writes[0], in a peer's slot, = reads[0]
  Copy,      // main or send: writes[0] = reads[0], inside the rank; on main the input, into what is the call's own
  Quantise,  // compute or send: writes[0], packed, = reads[0]
  Reduce,    // compute: writes[0] = the sum of reads, packed or not, in fp32, in their order, rounded once
  Notify,    // send or recv: set `flag` at its owner
  Await,     // send or recv: wait until the own `flag` is set, then clear it
  Record,    // any: `event` is reached when all before it on `stream` is done
  Wait,      // any: what follows on `stream` starts after `event`
};

inline constexpr int kKinds = 9;

struct Op {
  Kind kind = Kind::Gemm;
  Stream stream = kMain;
  std::vector<Region> reads;
  std::vector<Region> writes;
  bool bias = false;  // Gemm: the epilogue adds the bias
  Flag flag;          // Notify, Await
  int event = -1;     // Record, Wait; each event of a plan is recorded once

  bool is_data() const { return kind <= Kind::Reduce; }
  // Of a Gemm: the scales of reads[0], and what is added; null: none.
  const Region* scales() const { return reads.size() > 1 && is_scales(reads[1].buffer) ? &reads[1] : nullptr; }
  const Region* c() const {
    const std::size_t at = scales() ? 2 : 1;
    return reads.size() > at ? &reads[at] : nullptr;
  }
  // Whether it writes memory of a peer of rank `rank`, whose op it is.
  bool writes_peer(int rank) const { return !writes.empty() && writes[0].rank != rank; }
  auto tie() const { return std::tie(kind, stream, reads, writes, bias, flag, event); }
};

// What main does comes in two parts. The issue: all before its first Wait, so that it depends on no other stream. The
// join: the rest, which only waits for the other streams. Between the two the caller's stream does whatever the caller
// wants; the join may come at any time, on any stream, more than once or never. Where the input is copied first, it is
// the caller's again once the issue is over.
struct Plan {
  Spec spec;
  int rank = 0;
  int events = 0;       // event ids are 0 .. events-1
  std::vector<Op> ops;  // in issue order

  auto tie() const { return std::tie(spec, rank, events, ops); }
};

// Where in plan.ops the join begins: main's ops before it belong to the issue.
std::size_t join_begin(const Plan&);

template <class T>
using EnableTied = decltype(std::declval<const T&>().tie(), bool{});
template <class T>
EnableTied<T> operator==(const T& a, const T& b) {
  return a.tie() == b.tie();
}
template <class T>
EnableTied<T> operator!=(const T& a, const T& b) {
  return !(a == b);
}
template <class T>
EnableTied<T> operator<(const T& a, const T& b) {
  return a.tie() < b.tie();
}

// Shards that the slot of a rank has room for.
int slot_shards(const Spec&);
// The shard whose rows a region holds: `region.shard`, but in a slot that is indexed by sender.
int data_shard(const Spec&, const Region&);
// Whether its rows have fewer bits, and their scales with them: from their Quantise to the Reduce that reads them.
bool is_packed(const Spec&, const Region&);

// Full flags of one (sender, receiver) pair that any plan of this world size can use: a ring passes W-1 shards on, and
// an all-reduce does so twice.
constexpr int full_flags_per_pair(int world) { return 2 * kMaxChunks * (world > 1 ? world - 1 : 1); }

const char* name(Operation);
const char* name(Algorithm);
const char* name(Reduction);
const char* name(Transfer);
const char* name(Taper);
const char* name(Buffer);
const char* name(Kind);
std::string name(Stream);
std::string to_string(const Spec&);
std::string to_string(const Region&);
std::string to_string(const Flag&);
std::string to_string(const Op&);
std::string to_string(const Plan&);  // one line an op, for a person to follow

}  // namespace streamoverlap::plan
