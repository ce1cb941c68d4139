# awk -f check_includes.awk FILE...: which module may include which. One line for each breach; exit code 1.
#
# A file belongs to the module that its folder in src/ names, a public header to the module that
# defines it, as detail/collective.hpp to group. world.hpp and trace.hpp are group's too: every
# operation takes the default group, and Work traces its waits.
# types.hpp, elastic.hpp, engine.hpp, env.hpp, detail/arguments.hpp and detail/time_limit.hpp
# (interface) know no other file, so that every module may speak of types, calls and their limits,
# and the values of environment variables, which world/ reads.
BEGIN {
  may["interface"] = ""
  may["base"] = ""
  may["kernels"] = "base interface"
  may["record"] = "base interface"
  may["group"] = "base interface record"
  may["engines"] = "base interface kernels record group"
  may["world"] = "base interface kernels record group engines"
  may["dist"] = "base interface record group world"
  may["sync"] = "base interface record group world"
  may["run"] = "base interface world"
  may["nn"] = "base interface kernels record group engines world dist sync"
  may["c"] = "base interface group world"
  may["python"] = "interface kernels group world dist sync"
  # The c10d backend: Python comes in as a struct of functions.
  may["nn/backend"] = may["nn"] " nn"
  # lockstep_torch._torch: it takes from _core what speaks to Python.
  may["nn/torch_extension"] = may["nn/backend"] " nn/backend python"
  may["cli"] = "base interface kernels record group engines world dist sync run"
  # The umbrella is for programs.
  may["umbrella"] = "interface group world dist sync"
  may["programs"] = "interface group world dist sync umbrella nn"

  # The folders of the shared engine, from the segment up to the world.
  may["engines/shared/segment"] = ""
  may["engines/shared/protocol"] = "segment"
  may["engines/shared/algorithms"] = "segment protocol"
  may["engines/shared/bootstrap"] = "segment protocol algorithms"

  n = split("types:interface error:interface elastic:interface engine:interface group:group world:group launch:group trace:group env:interface " \
            "dist:dist objects:dist main_process:dist control:dist detail:dist sync_master:sync sync:sync lockstep:umbrella nn:nn " \
            "lockstep.h:c", pairs, " ")
  for (i = 1; i <= n; ++i) {
    split(pairs[i], pair, ":")
    public[pair[1]] = pair[2]
  }
}

function breach(text) {
  print FILENAME ":" FNR ": " text
  bad = 1
}

# The module of a path below include/ or src/; empty for what is not ours.
function module_of(path,   parts, n, name) {
  n = split(path, parts, "/")
  if (path == "lockstep/detail/collective.hpp") return "group"
  if (path ~ /^lockstep\/detail\/(arguments|time_limit)\.hpp$/) return "interface"
  if (parts[1] == "lockstep") {
    name = parts[2]
    sub(/\.hpp$/, "", name)
    return (name in public) ? public[name] : "unknown"
  }
  name = parts[1] "/" parts[2]
  if (n > 2 && name in may) return name
  return (n > 1 && parts[1] in may) ? parts[1] : ""
}

# The folder of the shared engine in which a path lies; empty elsewhere.
function folder_of(path,   parts) {
  return split(path, parts, "/") > 3 && path ~ /^engines\/shared\// ? parts[3] : ""
}

FNR == 1 {
  module = ""
  path = FILENAME
  if (sub(/^(src|include)\//, "", path)) module = module_of(path)
  folder = folder_of(path)
  if (folder != "" && !("engines/shared/" folder in may))
    breach("folder of the shared engine without a line in check_includes.awk")
  if (FILENAME ~ /^examples\//) module = "programs"
  if (module == "unknown") breach("public header of no known module: name it in check_includes.awk")
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
  if (header ~ /^(Python\.h$|(pybind11|nanobind|torch\/csrc\/(utils|python_headers))[\/.])/ && library &&
      module != "python" && module != "nn/torch_extension")
    breach("header of Python outside python and nn/torch_extension: " header)
  theirs = module_of(header)
  # The launcher keeps the segment of its ranks.
  if (module == "run" && header ~ /^engines\/shared\/bootstrap\//) theirs = ""
  if (module != "" && theirs != "" && theirs != module && index(" " may[module] " ", " " theirs " ") == 0)
    breach("module " module " may not include " header " (module " theirs "; it may: " may[module] ")")
}

folder != "" && line ~ /^ *# *include/ {
  theirs = folder_of(header)
  if (theirs != "" && theirs != folder && index(" " may["engines/shared/" folder] " ", " " theirs " ") == 0)
    breach("engines/shared/" folder " may not include " header " (it may: " may["engines/shared/" folder] ")")
}

library && line ~ /(^|[^a-z_])(secure_)?getenv *\(/ && FILENAME !~ /^src\/world\// {
  breach("getenv outside world: pass the value of Env or World, or use internal::variable")
}

library && line ~ /(^|[^A-Za-z_])volatile([^A-Za-z_]|$)/ && line !~ /asm/ {
  breach("volatile: use std::atomic")
}

library && line ~ /(^|[^A-Za-z_])assert *\(/ {
  breach("assert: throw, or say in a comment why it holds")
}

END { exit bad }
