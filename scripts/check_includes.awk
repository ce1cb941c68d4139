# awk -f check_includes.awk FILE...: who may include whom. One line for each breach; exit code 1.
#
# A file belongs to the room that its folder in src/ names, a public header to the room that defines
# it. launch.hpp is comm's: the thread's default group, which every verb takes, lives there. types.hpp
# (words) knows no other file, so that the kernels may speak of types.
BEGIN {
  may["words"] = ""
  may["base"] = ""
  may["kernels"] = "base words"
  may["comm"] = "base words"
  may["engines"] = "base words comm kernels"
  may["dist"] = "base words comm"
  may["sync"] = "base words comm engines"
  may["launch"] = "base words comm engines"
  may["nn"] = "base words comm kernels engines dist sync"
  may["cli"] = "base words comm kernels engines dist sync launch"
  # The umbrella is for programs.
  may["umbrella"] = "words comm dist sync launch"
  may["programs"] = "words comm dist sync launch umbrella nn"

  n = split("types:words error:comm engine:comm group:comm launch:comm trace:comm env:launch " \
            "dist:dist objects:dist control:dist detail:dist sync:sync lockstep:umbrella nn:nn", pairs, " ")
  for (i = 1; i <= n; ++i) {
    split(pairs[i], pair, ":")
    public[pair[1]] = pair[2]
  }
}

function breach(text) {
  print FILENAME ":" FNR ": " text
  bad = 1
}

# The room of a path below include/ or src/; empty for what is not ours.
function room_of(path,   parts, n, name) {
  n = split(path, parts, "/")
  if (parts[1] == "lockstep") {
    name = parts[2]
    sub(/\.hpp$/, "", name)
    return (name in public) ? public[name] : "unknown"
  }
  return (n > 1 && parts[1] in may) ? parts[1] : ""
}

FNR == 1 {
  room = ""
  path = FILENAME
  if (sub(/^(src|include)\//, "", path)) room = room_of(path)
  if (FILENAME ~ /^examples\//) room = "programs"
  if (room == "unknown") breach("public header of no known room: name it in check_includes.awk")
  library = FILENAME ~ /^(src|include)\//
  torch = FILENAME ~ /^(src|tests|bench)\/nn\// || FILENAME ~ /^bench\/peers\// ||
          FILENAME ~ /^include\/lockstep\/nn[\/.]/ || FILENAME ~ /^examples\// ||
          FILENAME ~ /^tests\/(examples|consumer|fuzz)\//
}

{
  line = $0
  sub(/\/\/.*/, "", line)
}

line ~ /^ *# *include/ {
  header = line
  gsub(/^[^<"]*[<"]|[>"].*$/, "", header)
  if (header ~ /^(torch|ATen|c10|caffe2)\// && !torch) breach("libtorch header outside nn: " header)
  if (header == "mpi.h" && FILENAME !~ /^(src\/engines\/mpi|bench\/(peers|over_mpi))\//)
    breach("mpi.h outside engines/mpi")
  theirs = room_of(header)
  if (room != "" && theirs != "" && theirs != room && index(" " may[room] " ", " " theirs " ") == 0)
    breach("room " room " may not include " header " (room " theirs "; it may: " may[room] ")")
}

library && line ~ /(^|[^A-Za-z_])volatile([^A-Za-z_]|$)/ && line !~ /asm/ {
  breach("volatile: use std::atomic")
}

library && line ~ /(^|[^A-Za-z_])assert *\(/ {
  breach("assert: throw, or say in a comment why it holds")
}

END { exit bad }
