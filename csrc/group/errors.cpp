#include "errors.h"

#include <cstdio>

namespace streamoverlap {
namespace {

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

std::string rank_text(int rank, int own) {
  if (rank < 0) return "an unknown rank";
  return "rank " + std::to_string(rank) + (rank == own ? " (this rank)" : "");
}

std::string message(const AbortRecord& record, const std::string& group, int rank, int world,
                    const std::string& own_op) {
  const std::string op = record.op[0] ? record.op : "a call";
  const std::string where =
      " on group '" + group + "' (rank " + std::to_string(rank) + " of " + std::to_string(world) + ")";
  const std::string reporter = rank_text(record.reporter, rank);
  std::string text;
  switch (record.kind) {
    case AbortKind::PeerTimeout:
      text = op + where + ": " + reporter + " waited " + seconds(record.elapsed) + " for ";
      text +=
          (record.culprit < 0 ? std::string("its peers") : rank_text(record.culprit, rank)) + ", which " + record.cause;
      break;
    case AbortKind::Mismatch:
      text = "ranks made different calls" + where + ": " + reporter + " called " + op + ", but " +
             rank_text(record.culprit, rank) + " called " + record.cause;
      break;
    case AbortKind::Aborted:
      text = op + where + ": " + reporter + " failed: " + record.cause;
      break;
  }
  if (!own_op.empty() && own_op != op) text += "; this rank called " + own_op;
  return text + "; the group cannot be used any more";
}

}  // namespace

AbortError::AbortError(const AbortRecord& record, const std::string& group, int rank, int world,
                       const std::string& own_op)
    : std::runtime_error(message(record, group, rank, world, own_op)),
      kind(record.kind),
      group(group),
      op(record.op),
      peer(record.culprit),
      elapsed(record.elapsed) {}

}  // namespace streamoverlap
