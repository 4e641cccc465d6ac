// What the builders write with: copies the input first if the plan does, appends ops in issue order, starts every
// stream after main and joins it at the end.
#pragma once

#include <array>
#include <vector>

#include "plan.h"

namespace streamoverlap::plan {

class Writer {
 public:
  Writer(const Spec& spec, int rank);

  const Spec& spec() const { return plan_.spec; }
  int world() const { return plan_.spec.world; }
  int rank() const { return plan_.rank; }
  int peer(int distance) const { return ((rank() + distance) % world() + world()) % world(); }

  // Regions of this rank, and the slot of another.
  Region input(int shard, int chunk) const { return {Buffer::Input, rank(), shard, chunk}; }
  Region output(int shard, int chunk) const { return {Buffer::Output, rank(), shard, chunk}; }
  Region gathered(int shard, int chunk) const { return {Buffer::Gathered, rank(), shard, chunk}; }
  Region scratch(int shard, int chunk) const { return {Buffer::Scratch, rank(), shard, chunk}; }
  Region packed(int shard, int chunk) const { return {Buffer::Packed, rank(), shard, chunk}; }
  Region slot(int shard, int chunk) const { return {Buffer::Slot, rank(), shard, chunk}; }
  static Region slot_of(int rank, int shard, int chunk) { return {Buffer::Slot, rank, shard, chunk}; }

  // Of the rows in a region.
  static Region scales(const Region& rows) { return {scales_of(rows.buffer), rows.rank, rows.shard, rows.chunk}; }

  // The input as it is to be read: where it was copied to, if the plan copies it.
  Region source(int shard, int chunk) const;

  Stream next_compute();  // round robin

  // Reads the scales of a, where it has some; takes the credits, where it stores.
  void gemm(Stream, std::vector<Region> a_and_c, const Region& d, bool bias);
  void reduce(Stream, std::vector<Region> terms, const Region& sum);
  void copy(const Region& from, const Region& to, Stream stream = kSend);
  void quantise(Stream, const Region& from, const Region& to);

  // Put on the send stream, of gathered rows with their scales, and set the receiver's flag `index`. The event is
  // reached once the flag is set.
  int put(const Region& from, const Region& to, int index);
  // The same of what a Gemm stored in the receiver's slot, once `stored` is reached.
  int notify(int receiver, int index, int stored);
  // Await on the recv stream, not before `after`. The event is reached once the data is there.
  int await(int sender, int index, int after);

  int record(Stream);
  void wait(Stream, int event);

  // The slot contract: all credits are taken before anything is sent and returned after everything is read.
  void take_credits();
  void return_credits();  // after all that was written so far on the compute and send streams
  Plan join();

 private:
  void copy_input();
  Op& emit(Kind, Stream);

  Plan plan_;
  int begin_ = -1;
  int credits_ = -1;  // event after the last credit is taken, where a Gemm waits for it
  int computes_ = 0;
  std::array<bool, kMaxStreams> started_{}, credited_{};
  std::array<int, kMaxStreams> fresh_{};  // event recorded after the last op of a stream, -1 where there is none
};

}  // namespace streamoverlap::plan
