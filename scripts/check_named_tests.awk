# awk -f scripts/check_named_tests.awk TEST_SOURCE... DOC.md...: in every table of the documents
# whose last column is `test`, each row must name tests that exist: `Suite`, `Suite.name`, `name` or a
# file. Only a row about what lockstep does not have, or does always, may name none ("no...", "none").

/^TEST(_[FP])?\(/ {
  split($0, part, /[(,)] */)
  exists[part[2]] = exists[part[3]] = exists[part[2] "." part[3]] = 1
}
FILENAME !~ /\.md$/ { next }

!/^\|/ { columns = 0; next }
!columns { columns = split($0, header, / *\| */) - 2; next }  # a table begins
header[columns + 1] != "test" || /^\|[-|]+$/ { next }
{
  split($0, cell, / *\| */)
  n_tokens = split(cell[columns + 1], token, "`")
  if (n_tokens < 3 && cell[columns] !~ /^no/) complain("names no test: " cell[2])
  for (i = 2; i <= n_tokens; i += 2) {
    name = token[i]
    if (name in exists || (name ~ /\// && system("test -e " name) == 0)) continue
    complain("no such test: " name)
  }
}

function complain(text) { printf "%s:%d: %s\n", FILENAME, FNR, text; bad = 1 }
END { exit bad }
