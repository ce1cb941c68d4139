# Draws DIRECTORY/{one,sync,plain,elastic}.dat (step, mean loss since the line before) to
# DIRECTORY/loss.svg, with a line where each rank of elastic was killed.
set terminal svg size 720,500 font "Helvetica,Arial,sans-serif,17" background "#ffffff" rounded
set output directory . "/loss.svg"

set border 3 linewidth 1 linecolor rgb "#888888"
set tics nomirror out textcolor rgb "#444444"
set grid ytics xtics linetype 1 linewidth 0.6 linecolor rgb "#e2e2e2"
set xlabel "epoch" textcolor rgb "#222222"
set ylabel "training loss" textcolor rgb "#222222"
set title "Handwritten digits, global batch of 8, same seed" font ",19" textcolor rgb "#111111"
set key top right spacing 1.2 samplen 3 textcolor rgb "#222222"
stats directory . "/one.dat" using 2 name "one" nooutput
stats directory . "/plain.dat" using 2 name "plain" nooutput
least = one_min < plain_min ? one_min : plain_min
most = one_max > plain_max ? one_max : plain_max
set yrange [0.65 * least : 1.25 * most]
set logscale y
set format y "%g"
set ytics add (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
set xtics 1

epoch(step) = step / real(steps_per_epoch)
killed = "#b26a00"
do for [step in killed_at] {
  set arrow from first epoch(step), graph 0 rto graph 0, graph 0.55 nohead \
      linewidth 1 dashtype 2 linecolor rgb killed
}
set label "rank 2 killed" at first epoch(word(killed_at, 1)), graph 0.04 offset 0.6,0 \
    font ",15" textcolor rgb killed
set label "rank 1 killed, replaced" at first epoch(word(killed_at, 2)), graph 0.04 offset 0.6,0 \
    font ",15" textcolor rgb killed
plot directory . "/one.dat" using (epoch($1)):2 with lines linewidth 8 linecolor rgb "#a9cbee" \
       title "one rank", \
     directory . "/sync.dat" using (epoch($1)):2 with lines linewidth 2 linecolor rgb "#0b4f9e" \
       title "4 ranks, SyncBatchNorm", \
     directory . "/elastic.dat" using (epoch($1)):2 with points pointtype 7 pointsize 0.6 \
       linecolor rgb "#f2a33a" title "4 ranks, two killed, one replaced", \
     directory . "/plain.dat" using (epoch($1)):2 with lines linewidth 2 linecolor rgb "#d1495b" \
       title "4 ranks, BatchNorm"
